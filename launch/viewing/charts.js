"use strict";
// The charts of a run. What changes is drawn, and what belongs together shares a chart; what stays is a line in a table.

const COLOURS = ["#2a6db5", "#d98324", "#3f9d63", "#b0476e", "#7a5cc0", "#8a7a3a", "#2f9aa6", "#c8483c", "#6b7280", "#d4a017"];
const FIRST = ["rollout/reward", "rollout/pass_at", "learn/entropy", "learn/loss", "learn/grad_norm"];
// Parts of a whole stand upon each other, others side by side. The first group names the chart, the second the part.
const PARTS = [
  { pattern: /^((?:rollout|eval|eval\/[^/]+)\/(?:ended|judged_by))_(.+)$/, stacked: true },
  { pattern: /^(stream\/(?:groups|staleness|tokens))_(?!m[aei][xan])(.+)$/, stacked: true },
  { pattern: /^(time)\/(wait|score|credit|learn|publish|checkpoint|evaluate)$/, stacked: true },
  { pattern: /^((?:rollout|eval|eval\/[^/]+)\/pass_at)_(\d+)$/ },
  { pattern: /^(learn\/clip_fraction)(?:_(low|high|dual))?$/ },
  { pattern: /^(learn\/weight)_(\w+)_fraction$/ },
  { pattern: /^time()\/(\w+)_idle$/, title: "time/idle" },
];
const SIGNS = { line: "—", part: "■", dots: "●" };
const WIDTH = 300, HEIGHT = 118, TOP = 8, BOTTOM = 16;

// -- what shares a chart ------------------------------------------------------------------------------------

// Charts by their order on the page. A line knows its metric, what it is called beside the others, which edge of
// a band it is, and whether it is about held-out tasks: these are dots in the chart of the training's, but for those of a
// set that has a name, which has charts of its own.
function chartsOf(names) {
  const charts = new Map();
  for (const name of [...names].sort()) {
    const parts = PARTS.find(({ pattern }) => pattern.test(name));
    const heldOut = name.startsWith("eval/") && !parts?.stacked;
    const training = heldOut && name.split("/").length === 2 ? name.replace("eval/", "rollout/") : name;
    const [, found, part = "all"] = parts ? parts.pattern.exec(training) : /^(.+)_(min|mean|max)$/.exec(training) || [null, training, ""];
    const title = parts?.title || found;
    if (!charts.has(title)) charts.set(title, { title, stacked: Boolean(parts?.stacked), parted: Boolean(parts), lines: [] });
    charts.get(title).lines.push({ name, part, heldOut });
  }
  const order = (chart) => (FIRST.indexOf(chart.title) + FIRST.length + 1) % (FIRST.length + 1);
  return [...charts.values()].sort((one, other) => order(one) - order(other));
}

const valuesOf = (records, name) => records.filter((each) => typeof each[name] === "number").map((each) => [each.step, each[name]]);

const stays = (runs, name) => runs.every((records) => new Set(valuesOf(records, name).map((each) => each[1])).size < 2);

// What is drawn, and the metrics that are not: those of a chart in which nothing changes, and parts that are always 0.
function sorted(runs, names) {
  const moving = [], constant = [];
  for (const chart of chartsOf(names)) {
    const isStill = chart.lines.every(({ name }) => stays(runs, name));
    const lines = isStill ? [] : chart.lines.filter(({ name }) => !chart.stacked || runs.some((records) => valuesOf(records, name).some((each) => each[1] !== 0)));
    if (lines.length) moving.push({ ...chart, title: lines.length === 1 ? lines[0].name : chart.title, lines });
    constant.push(...chart.lines.filter((line) => !lines.includes(line)).map(({ name }) => name));
  }
  return { moving, constant: constant.sort() };
}

// Not by Math.min(...values): a function takes some ten thousand arguments, and a long run has more values.
const lowest = (values) => values.reduce((low, each) => Math.min(low, each), Infinity);
const highest = (values) => values.reduce((high, each) => Math.max(high, each), -Infinity);

// -- one chart ----------------------------------------------------------------------------------------------

// Values at which the axis has a label: three to five round numbers, which enclose all that is drawn.
function ticks(low, high) {
  const rough = (high - low || Math.abs(high) || 1) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

function tickText(value) {
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  return size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

// A name that a narrow screen may break after a slash or an underscore, and nowhere else.
function breakable(name) {
  return name.split(/(?<=[/_])/).flatMap((piece, index) => (index ? [document.createElement("wbr"), piece] : [piece]));
}

// Several parts have a colour each, so they are those of one run; a band and its line have that of their run.
function chart(made, runs, chosen) {
  const series = made.parted ? partsOf(made, runs[chosen]) : runs.flatMap((records, index) => bandOf(made, records, COLOURS[index % COLOURS.length]));
  const points = series.flatMap((each) => [...each.points, ...(each.base || [])]);
  const steps = points.map((each) => each[0]), values = points.map((each) => each[1]);
  const [left, right] = [lowest(steps), highest(steps)];
  const marks = ticks(Math.min(lowest(values), ...(made.stacked ? [0] : [])), highest(values));
  const margin = 6 + 5.8 * Math.max(...marks.map((each) => tickText(each).length));
  const x = (step) => margin + ((WIDTH - margin - 4) * (step - left)) / (right - left || 1);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * (value - marks[0])) / (marks.at(-1) - marks[0]);
  const path = (line) => line.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${made.title} over the steps` });
  for (const mark of marks) {
    picture.append(drawn("line", { class: "grid", x1: margin, x2: WIDTH - 4, y1: y(mark), y2: y(mark) }));
    picture.append(drawn("text", { x: margin - 4, y: y(mark) + 3.5, "text-anchor": "end" }, tickText(mark)));
  }
  picture.append(drawn("text", { x: margin, y: HEIGHT - 3 }, String(left)), drawn("text", { x: WIDTH - 4, y: HEIGHT - 3, "text-anchor": "end" }, String(right)));
  for (const { points: line, base, kind, colour } of series) {
    if (base) picture.append(drawn("polygon", { points: path([...line, ...base.toReversed()]), fill: colour, "fill-opacity": kind === "part" ? 0.75 : 0.18 }));
    if (kind === "line") picture.append(drawn("polyline", { points: path(line), fill: "none", stroke: colour, "stroke-width": 1.6 }));
    const radius = kind === "edge" ? 1.3 : kind === "dots" || (kind === "line" && line.length < 2) ? 2.6 : 0;
    if (radius) for (const [step, value] of line) picture.append(drawn("circle", { cx: x(step), cy: y(value), r: radius, fill: colour }));
  }
  const legend = series.filter(({ label }) => label !== null).map(({ label, colour, kind, points: line, last, range = "" }) => element("li", {}, [element("span", { textContent: `${SIGNS[kind]} `, style: { color: colour } }), ...(made.lines.length === 1 ? [] : breakable(label)), ` ${shown(last ?? line.at(-1)[1])}${range}`]));
  const section = element("section", { className: "chart" }, [element("h3", {}, breakable(made.title)), picture, element("ul", { className: "legend" }, legend)]);
  section.dataset.names = [made.title, ...made.lines.map(({ name }) => name)].join(" ").toLowerCase();
  return section;
}

// The parts of one run: areas upon each other, or lines and, for held-out tasks, dots.
function partsOf({ lines, stacked }, records) {
  // A step may have two records, of its update and of its evaluation, and a part that is not there is 0.
  const values = lines.map(({ name }) => new Map(valuesOf(records, name).sort((one, other) => one[1] - other[1])));
  const steps = [...new Set(values.flatMap((each) => [...each.keys()]))].sort((one, other) => one - other);
  let below = new Map();
  return lines.map(({ name, part, heldOut }, index) => {
    const colour = COLOURS[(stacked ? index : lines.findIndex((each) => each.part === part)) % COLOURS.length];
    const points = stacked ? steps.map((step) => [step, values[index].get(step) || 0]) : valuesOf(records, name);
    if (!stacked) return { points, colour, kind: heldOut ? "dots" : "line", label: heldOut ? `held-out ${part}` : part };
    const base = points.map(([step]) => [step, below.get(step) || 0]);
    const top = points.map(([step, value], at) => [step, value + base[at][1]]);
    below = new Map([...below, ...top]);
    return { points: top, base, colour, kind: "part", label: part, last: points.at(-1)?.[1] };
  }).filter(({ points }) => points.length);
}

// A run's mean as a line in a band from its lowest to its highest value, and dots for held-out tasks.
function bandOf({ lines }, records, colour) {
  return [false, true].flatMap((heldOut) => {
    const edges = Object.fromEntries(lines.filter((each) => each.heldOut === heldOut).map(({ name, part }) => [part, valuesOf(records, name)]));
    const middle = ["", "mean", "max", "min"].find((part) => edges[part]?.length);
    if (middle === undefined) return [];
    const sides = ["min", "max"].filter((part) => middle === "mean" && edges[part]?.length);
    const range = sides.map((part) => shown(edges[part].at(-1)[1])).join(" to ");
    return [middle, ...sides].map((part) => ({
      points: edges[part],
      base: part === middle || heldOut ? undefined : edges[middle],
      colour,
      kind: part === middle ? (heldOut ? "dots" : "line") : heldOut ? "edge" : "band",
      label: part === middle ? (heldOut ? "held-out" : middle) : null,
      range: range && ` (${sides.length === 1 ? `${sides[0]} ` : ""}${range})`,
    }));
  });
}

// -- all of them --------------------------------------------------------------------------------------------

// A line for each metric that stays as it is.
function constants(runs, names) {
  return element("table", {}, [element("tbody", {}, names.map((name) => {
    const row = element("tr", {}, [element("td", {}, breakable(name)), ...runs.map((records) => element("td", { className: "value", textContent: shown(valuesOf(records, name).at(-1)?.[1]) }))]);
    row.dataset.names = name.toLowerCase();
    return row;
  }))]);
}

const filter = element("input", { type: "search", placeholder: "Filter: reward, eval, tokens", "aria-label": "Filter the charts" });
filter.addEventListener("input", () => narrow(document));

// Show what the filter names: each of its words has to be in the name of the chart or of one of its metrics.
function narrow(within) {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const each of within.querySelectorAll("[data-names]")) each.hidden = !words.every((word) => each.dataset.names.includes(word));
}

function curves(runs, chosen) {
  const names = new Set(runs.flat().flatMap((each) => Object.keys(each).filter((name) => name !== "step" && typeof each[name] === "number")));
  if (!names.size) return [element("p", { textContent: "No update yet." })];
  const { moving, constant } = sorted(runs, names);
  const there = moving.filter(({ parted, lines }) => !parted || lines.some(({ name }) => valuesOf(runs[chosen], name).length));
  const all = element("div", {}, [element("div", { className: "charts" }, there.map((each) => chart(each, runs, chosen)))]);
  if (constant.length) all.append(element("h2", { textContent: "What stays the same" }), element("div", { className: "constants" }, [constants(runs, constant)]));
  narrow(all);
  return [element("div", { className: "tools" }, [filter]), all];
}
