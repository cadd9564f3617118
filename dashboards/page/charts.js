// Charts: tok/s by concurrency, and over time. Colours come from the style sheet, so both schemes have theirs.

const HEIGHT = 280;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const POWERS = Array.from({length: 13}, (_, at) => 2 ** at);
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

function axes(x, y) {
  const look = {stroke: colour("--soft"), grid: {stroke: colour("--line"), width: 1}, ticks: {stroke: colour("--line")}};
  return [{...look, ...x}, {...look, size: 60, ...y}];
}

/** A chart that fits its place and follows the colour scheme. `options()` and `data()` are asked again at each change. */
class Chart {
  constructor(place, options, data) {
    this.place = place;
    this.options = options;
    this.data = data;
    this.shape = "";
    new ResizeObserver(() => this.fit()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
  }

  fit() {
    const width = this.place.clientWidth;
    if (width && this.plot && width !== this.plot.width) this.plot.setSize({width, height: HEIGHT});
    else if (width && !this.plot) this.build();
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.place.clientWidth) return;
    const options = this.options();
    this.shape = options.series.map((series) => series.label).join();
    this.plot = new window.uPlot({width: this.place.clientWidth, height: HEIGHT, ...options}, this.data(), this.place);
  }

  draw() {
    const shape = this.options().series.map((series) => series.label).join();
    if (!this.plot || shape !== this.shape) this.build();
    else this.plot.setData(this.data());
  }
}

/** `lines`: [{label, points: [{x, y}]}]; x is requests at once, shown by powers of two. */
export function curveChart(place) {
  let lines = [];
  const data = () => {
    const xs = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
    return [xs, ...lines.map((line) => xs.map((x) => line.points.find((point) => point.x === x)?.y ?? null))];
  };
  const options = () => ({
    scales: {x: {time: false, distr: 3, log: 2, range: (_, low, high) => [Math.max(0.75, low * 0.8), Math.max(2, high * 1.25)]},
      y: {range: (_, low, high) => [0, (high || 1) * 1.1]}},
    axes: axes({label: "requests decoding at once", labelSize: 22,
      splits: (_, __, low, high) => POWERS.filter((power) => power >= low && power <= high),
      values: (_, ticks) => ticks.map((tick) => tick ?? "")},
      {label: "tok/s of one replica", labelSize: 22}),
    series: [{label: "at once"}, ...lines.map((line, at) => ({
      label: line.label,
      stroke: colour(`--series-${1 + (at % 4)}`),
      width: 2,
      dash: DASHES[at % 4],
      spanGaps: true,
      points: {show: true, size: 7},
      value: (_, value) => (value === null ? "–" : `${value.toFixed(1)} tok/s`),
    }))],
  });
  const chart = new Chart(place, options, data);
  return (next) => {
    lines = next;
    chart.draw();
  };
}

/** `past`: [{at (Unix seconds), tokensPerS}]. */
export function timeChart(place) {
  let past = [];
  const chart = new Chart(place, () => ({
    scales: {y: {range: (_, low, high) => [0, (high || 1) * 1.1]}},
    axes: axes({}, {label: "tok/s", labelSize: 22}),
    series: [{}, {label: "tok/s of all replicas", stroke: colour("--series-1"), width: 2, points: {show: false},
      value: (_, value) => (value === null ? "–" : value.toFixed(1))}],
  }), () => [past.map((point) => point.at), past.map((point) => point.tokensPerS)]);
  return (next) => {
    past = next;
    chart.draw();
  };
}
