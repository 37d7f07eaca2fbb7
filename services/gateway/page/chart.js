// Draws line and column charts that share one cursor. Knows nothing about the metrics.

import { h } from "./dom.js";
import { place } from "./format.js";
import { folded, note, table } from "./parts.js";
import { extent, linear, nearest, ticks } from "./scale.js";

const HEIGHT = 168, LEFT = 50, RIGHT = 12, TOP = 10, BOTTOM = 22;
const COLUMN = 330, GAP = 16;
const STYLES = 8;
/** With more points, markers would hide the curve and become dots. */
const SHAPES_MAX = 60;
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 2", "8 2"];
const SHAPES = [
  (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  (r) => `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (r) => `M0 ${-1.3 * r}L${1.2 * r} ${r}H${-1.2 * r}z`,
  (r) => `M0 ${-1.4 * r}L${1.4 * r} 0L0 ${1.4 * r}L${-1.4 * r} 0z`,
];

/** The width of one chart in a row of charts of this total width. */
function columnWidth(width) {
  const columns = Math.max(1, Math.floor((width + GAP) / (COLUMN + GAP)));
  // A border of 1 px on each side.
  return Math.floor((width - GAP * (columns - 1)) / columns) - 2;
}

/**
 * The state that all charts of a view share: the axis, the width of a chart, and the cursor, which is
 * at `newest` until it is moved. `setCursor(x)` moves it to a value, `stepCursor(by)` along `stops`.
 */
export function chartState(page) {
  const opened = new Set();
  let cursor = null;
  const setCursor = (x) => {
    if (x === cursor) return;
    cursor = x;
    page.redraw();
  };
  return (axis, stops, newest) => ({
    axis, stops, setCursor, opened, cursor: cursor ?? newest, domain: [0, Math.max(1, ...stops)],
    width: columnWidth(page.width()), redraw: page.redraw,
    stepCursor(by) {
      const at = stops.indexOf(nearest(stops, cursor ?? newest)) + by;
      setCursor(stops[Math.max(0, Math.min(stops.length - 1, at))]);
    },
  });
}

function frame({ id, title, unit, subtitle, legend, summary, headings, rows }, shared, x, drawing) {
  const { axis, cursor, width } = shared;
  const onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by) return;
    event.preventDefault();
    shared.stepCursor(by);
  };
  return h("figure.chart", { key: id, "data-chart": id },
    h("figcaption", h("h3", title, unit && h("small", ` ${unit}`)), h("ul.legend", legend)),
    h("svg", { width, height: HEIGHT, role: "img", tabindex: 0, onkeydown, "aria-label": `${title} by ${axis}` },
      h("title", title), h("desc", summary), drawing, h("line.cursor", { x1: x(cursor), x2: x(cursor), y1: TOP, y2: HEIGHT - BOTTOM })),
    subtitle && note(subtitle),
    folded(`table ${id}`, "Show as table", shared, () => table(`${title} by ${axis}`, [axis, ...headings], rows())));
}

const item = (at, mark, name, value) => h("li", { key: name, class: `s${at % STYLES}` }, mark, h("span.name", name), h("b", value));
const text = (x, y, anchor, content) => h("text", { x, y, "text-anchor": anchor }, content);

function axes({ axis, domain }, x, y, right, yTicks, write) {
  const xTicks = ticks(domain, right / 55).filter((it) => axis !== "cycle" || Number.isInteger(it));
  return h("g.axes",
    yTicks.map((it) => [h("line", { x1: LEFT, x2: right, y1: y(it), y2: y(it) }), text(LEFT - 6, y(it) + 4, "end", write(it))]),
    xTicks.map((it) => text(x(it), HEIGHT - 6, "middle", it)));
}

/** The last point at or before the cursor. */
const pointAt = (points, cursor) => points.findLast((it) => it.x <= cursor + 1e-9);
const withRange = (it, write) => (it.low === undefined ? write(it.y) : `${write(it.y)} (${write(it.low)} – ${write(it.high)})`);

/** Lines of points {x, y, low, high, odd}; `hue` is the number of a line's colour. */
export function lineChart(chart, shared) {
  const { width, domain, cursor, setCursor } = shared;
  const { lines, write, tick } = chart;
  const range = extent(lines.flatMap(({ points }) => points.flatMap((it) => [it.y, it.low, it.high])), chart);
  const right = width - RIGHT;
  const x = linear(domain, [LEFT, right]);
  const y = linear(range, [HEIGHT - BOTTOM, TOP]);
  const xs = [...new Set(lines.flatMap(({ points }) => points.map((it) => it.x)))].sort((a, b) => a - b);
  const onpointermove = ({ currentTarget, clientX }) =>
    setCursor(nearest(xs, linear([LEFT, right], domain)(clientX - currentTarget.ownerSVGElement.getBoundingClientRect().left)));
  const valueAt = ({ points }, at) => {
    const it = points.find((one) => one.x === at);
    return it && withRange(it, write);
  };
  return frame({
    ...chart,
    legend: lines.map((line, at) => {
      const here = pointAt(line.points, cursor);
      return item(line.hue ?? at, swatch(at), line.name, here ? withRange(here, write) : "–");
    }),
    summary: `Latest values: ${lines.map(({ name, points }) => `${name} ${withRange(points.at(-1), write)}`).join("; ")}.`,
    headings: lines.map(({ name }) => name),
    rows: () => xs.map((at) => [place(at), ...lines.map((line) => valueAt(line, at))]),
  }, shared, x, [
    axes(shared, x, y, right, ticks(range), tick),
    lines.map((line, at) => drawLine(line, at, { x, y, band: chart.band, here: pointAt(line.points, cursor) })),
    h("rect.catch", { x: LEFT, width: right - LEFT, height: HEIGHT - BOTTOM, onpointermove }),
  ]);
}

const swatch = (at) => h("svg", { width: 22, height: 10, "aria-hidden": "true" },
  h("path.curve", { d: "M0 5H22", "stroke-dasharray": DASHES[at % STYLES] }),
  h("path.mark", { transform: "translate(11 5)", d: SHAPES[at % SHAPES.length](3) }));

const leastSwatch = () => h("svg", { width: 22, height: 10, "aria-hidden": "true" }, h("line.least", { x1: 0, x2: 22, y1: 5, y2: 5 }));

function drawLine({ points, name, hue }, at, { x, y, band, here }) {
  const to = (it, value) => `${x(it.x).toFixed(1)} ${y(value).toFixed(1)}`;
  const wide = points.filter((it) => it.low !== undefined);
  const edge = [...wide.map((it) => to(it, it.high)), ...wide.toReversed().map((it) => to(it, it.low))];
  const shape = SHAPES[at % SHAPES.length](points.length > SHAPES_MAX ? 1.2 : 3);
  return h("g", { class: `s${(hue ?? at) % STYLES}` },
    band ? edge.length > 2 && h("path.band", { d: `M${edge.join("L")}z` })
      : wide.map((it) => h("path.error", { d: `M${to(it, it.low)}L${to(it, it.high)}` })),
    h("path.curve", { d: `M${points.map((it) => to(it, it.y)).join("L")}`, "stroke-dasharray": DASHES[at % STYLES] }),
    points.map((it) => h("path.mark", { class: `${it.odd ? "odd" : ""} ${it === here ? "here" : ""}`, d: shape,
      transform: `translate(${to(it, it.y)})`, "data-x": it.x, "data-y": it.y, "data-line": name })));
}

/**
 * One column per cycle, of stacked parts {name, from, to, value, wide, hue}; `wide` is a share of the
 * column's width. Each cycle has its own `legend` and `mark` (the height of a dashed line).
 */
export function columnChart(chart, shared) {
  const { width, domain, cursor, setCursor } = shared;
  const { all, write, part } = chart;
  const right = width - RIGHT;
  const parts = all.flatMap((it) => it.parts);
  const range = [Math.min(...parts.map((it) => it.from)), Math.max(...parts.map((it) => it.to))];
  const x = linear([domain[0] - 0.5, domain[1] + 0.5], [LEFT, right]);
  const y = linear(range, [HEIGHT - BOTTOM, TOP]);
  const size = Math.min(52, (x(1) - x(0)) * 0.86);
  const shown = all.findLast(({ cycle }) => cycle <= cursor) ?? all[0];
  const column = ({ cycle, parts: stacked, mark }) => {
    const start = x(cycle) - size / 2;
    return h("g", { class: cycle === shown.cycle && "here", onpointermove: () => setCursor(cycle) },
      h("rect.catch", { x: start, width: size, y: TOP, height: HEIGHT - TOP - BOTTOM }),
      stacked.map((it) => h("rect.part", {
        class: `s${it.hue % STYLES}`, x: start, width: size * it.wide, y: y(it.to), height: y(it.from) - y(it.to),
        "data-x": cycle, "data-y": it.value, "data-part": it.name,
      })),
      mark !== null && h("line.least", { x1: start, x2: start + size, y1: y(mark), y2: y(mark) }));
  };
  return frame({
    ...chart,
    legend: shown.legend.map(([name, value, hue, shape]) => item(hue, shape === "line" ? leastSwatch() : h("i.block"), name, value)),
    summary: `Cycle ${shown.cycle}: ${shown.parts.map(({ name, value }) => `${name} ${value}`).join(", ")}.`,
    headings: [part, "samples"],
    rows: () => all.flatMap(({ cycle, parts: listed }) => listed.map(({ name, value }) => [cycle, name, value])),
  }, shared, x, [axes(shared, x, y, right, ticks(range, 3), write), all.map(column)]);
}
