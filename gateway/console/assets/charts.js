// Draws figures above their tables, which stay the source: the same values, read from them.


const color = (name) => {
  const probe = document.createElement("span");
  probe.hidden = true;
  probe.className = name;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

function read(figure) {
  const rows = [...figure.querySelectorAll("tbody tr")];
  const labels = rows.map((row) => row.querySelector("[data-x]").dataset.x);
  const values = rows.map((row) => Number(row.querySelector(".net .amount").textContent));
  return { labels, values };
}

function draw(figure) {
  const { labels, values } = read(figure);
  const area = document.createElement("div");
  area.className = "chart-area";
  area.setAttribute("role", "img");
  area.setAttribute("aria-label", `${figure.dataset.chart}. The table below has the same values.`);
  figure.prepend(area);
  const ink = color("chart-ink");
  const line = color("chart-line");
  const fill = color("chart-fill");
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  const options = {
    width: area.clientWidth,
    height: 220,
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] } },
    axes: [
      { ...axis, values: (_, marks) => marks.map((at) => (Number.isInteger(at) ? labels[at] ?? "" : "")) },
      { ...axis, size: 72, values: (_, marks) => marks.map((at) => `$${Number(at.toPrecision(6))}`) },
    ],
    series: [{}, { stroke: fill, fill, paths: uPlot.paths.bars({ size: [0.7, 48] }), points: { show: false } }],
  };
  const chart = new uPlot(options, [labels.map((_, at) => at), values], area);
  new ResizeObserver(() => chart.setSize({ width: area.clientWidth, height: 220 })).observe(area);
}

for (const figure of document.querySelectorAll("[data-chart]")) draw(figure);
