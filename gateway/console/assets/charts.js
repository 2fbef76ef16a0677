// Draws figures above their tables, which stay the source: the same values, read from them.

import { color } from "./colors.js";

const SERIES = 12;

/** Read the rows: where they are on the axis, to which series they belong, and their values. */
function read(figure) {
  const rows = [...figure.querySelectorAll("tbody tr")].map((row) => ({
    x: row.querySelector("[data-x]").dataset.x,
    series: row.querySelector("[data-series]")?.dataset.series ?? "",
    value: Number(row.dataset.value),
    before: row.dataset.before === undefined ? null : Number(row.dataset.before),
  }));
  const labels = [...new Set(rows.map((row) => row.x))];
  const names = [...new Set(rows.map((row) => row.series))];
  const at = new Map(labels.map((label, place) => [label, place]));
  const values = names.map((name) => {
    const line = labels.map(() => 0);
    for (const row of rows) if (row.series === name) line[at.get(row.x)] += row.value;
    return line;
  });
  const compared = rows.some((row) => row.before !== null);
  const before = compared ? labels.map(() => 0) : null;
  if (compared) for (const row of rows) before[at.get(row.x)] += row.before ?? 0;
  return { labels, names, values, before };
}

/** Series are drawn one above the other: each up to the sum of those below it, the highest first. */
function stacked(values) {
  const sums = [];
  for (const line of values) {
    const below = sums.at(-1);
    sums.push(line.map((value, at) => value + (below ? below[at] : 0)));
  }
  return sums;
}

function legend(entries) {
  const list = document.createElement("p");
  list.className = "legend";
  list.setAttribute("aria-hidden", "true");
  for (const [name, look] of entries) {
    const one = document.createElement("span");
    const mark = document.createElement("i");
    mark.className = look;
    one.append(mark, name || "without");
    list.append(one);
  }
  return list;
}

function draw(figure) {
  const { labels, names, values, before } = read(figure);
  const area = document.createElement("div");
  area.className = "chart-area";
  area.setAttribute("role", "img");
  area.setAttribute("aria-label", `${figure.dataset.chart}. The table below has the same values.`);
  const money = figure.dataset.chart.endsWith("$");
  const ink = color("chart-ink");
  const line = color("chart-line");
  const looks = names.map((_, at) => (names.length > 1 ? `chart-${(at % SERIES) + 1}` : "chart-fill"));
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  const bars = uPlot.paths.bars({ size: [0.7, 48] });
  const sums = stacked(values);
  const series = sums.map((_, at) => {
    const fill = color(looks[at]);
    return { stroke: fill, fill, paths: bars, points: { show: false } };
  });
  const data = [labels.map((_, at) => at), ...sums.toReversed()];
  const options = {
    width: area.clientWidth,
    height: 220,
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] } },
    axes: [
      { ...axis, space: 96, values: (_, marks) => marks.map((at) => (Number.isInteger(at) ? labels[at] ?? "" : "")) },
      { ...axis, size: 72, values: (_, marks) => marks.map((at) => `${money ? "$" : ""}${Number(at.toPrecision(6))}`) },
    ],
    series: [{}, ...series.toReversed()],
  };
  if (before) {
    options.series.push({ stroke: ink, dash: [4, 3], width: 2, points: { show: true, size: 4 } });
    data.push(before);
  }
  const entries = names.length > 1 ? names.map((name, at) => [name, looks[at]]) : [];
  if (before) entries.push(["before", "chart-ink dashed"]);
  figure.prepend(area);
  if (entries.length) area.after(legend(entries));
  options.width = area.clientWidth;
  const chart = new uPlot(options, data, area);
  new ResizeObserver(() => chart.setSize({ width: area.clientWidth, height: 220 })).observe(area);
}

for (const figure of document.querySelectorAll("[data-chart]")) draw(figure);
