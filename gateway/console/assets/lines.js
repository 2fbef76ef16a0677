// Draws lines above their table, which stays the source: a column of it each, over the first one.
// data-steps: a value holds until the next row. data-time: the first column has moments.

import { color } from "./colors.js";
const COLORS = ["chart-1", "chart-2", "chart-3", "chart-4", "chart-5", "chart-6"];
const value = (cell) => {
  const number = Number(cell.textContent.replace(/[^0-9.-]/g, "") || NaN);
  return Number.isFinite(number) ? number : null;
};

function read(figure) {
  const heads = [...figure.querySelectorAll("thead th")];
  const rows = [...figure.querySelectorAll("tbody tr")].filter((row) => row.querySelector("[data-x]"));
  const at = rows.map((row) => row.querySelector("[data-x]").dataset.x);
  const columns = heads
    .map((head, index) => ({ head, index }))
    .filter(({ head, index }) => index && (head.dataset.line !== undefined || !figure.querySelector("[data-line]")))
    .map(({ head, index }) => ({
      name: head.textContent.replace(/, \$$/, ""),
      isMark: head.dataset.mark !== undefined,
      values: rows.map((row) => value(row.children[index])),
    }));
  return { at, columns };
}

function legend(columns, colors) {
  const list = document.createElement("p");
  list.className = "legend";
  list.setAttribute("aria-hidden", "true");
  columns.forEach((column, index) => {
    const item = document.createElement("span");
    const line = document.createElement("i");
    line.className = `line ${colors[index]}${column.isMark ? " dashed" : ""}`;
    item.append(line, column.name);
    list.append(item);
  });
  return list;
}

function draw(figure) {
  const { at, columns } = read(figure);
  const isTime = figure.dataset.time !== undefined;
  const steps = figure.dataset.steps !== undefined;
  const x = isTime ? at.map((text) => Date.parse(text) / 1000) : at.map((_, index) => index);
  if (isTime) {
    const order = x.map((_, index) => index).sort((a, b) => x[a] - x[b]);
    const sorted = (list) => order.map((index) => list[index]);
    x.splice(0, x.length, ...sorted(x));
    for (const column of columns) column.values = sorted(column.values);
    if (steps) {
      // The last value holds until now.
      x.push(Date.parse(figure.dataset.until) / 1000);
      for (const column of columns) column.values.push(column.values.at(-1));
    }
  }
  const names = columns.map((column, index) => (column.isMark ? "chart-mark" : COLORS[index % COLORS.length]));
  const area = document.createElement("div");
  area.className = "chart-area";
  area.setAttribute("role", "img");
  area.setAttribute("aria-label", `${figure.dataset.lines}. The table below has the same values.`);
  figure.prepend(area, legend(columns, names));
  const axis = { stroke: color("chart-ink"), grid: { stroke: color("chart-line"), width: 1 }, ticks: { stroke: color("chart-line") } };
  // Ticks can be hours apart; the day is that of the page's zone.
  const zone = figure.dataset.zone || "UTC";
  const day = (mark) => new Date(mark * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: zone });
  const options = {
    width: area.clientWidth,
    height: 220,
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: isTime }, y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1] } },
    axes: [
      isTime ? { ...axis, values: (_, marks) => marks.map(day) } : { ...axis, incrs: [1, 2, 5, 10], values: (_, marks) => marks.map((mark) => (Number.isInteger(mark) ? at[mark] ?? "" : "")) },
      { ...axis, size: 76, values: (_, marks) => marks.map((mark) => `$${Number(mark.toPrecision(6))}`) },
    ],
    series: [
      {},
      ...columns.map((column, index) => ({
        stroke: color(names[index]),
        width: 2,
        dash: column.isMark ? [6, 4] : undefined,
        points: { show: !column.isMark && !steps, size: 6 },
        paths: steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
      })),
    ],
  };
  const chart = new uPlot(options, [x, ...columns.map((column) => column.values)], area);
  new ResizeObserver(() => chart.setSize({ width: area.clientWidth, height: 220 })).observe(area);
}

for (const figure of document.querySelectorAll("[data-lines]")) draw(figure);
