// Draws a run's timeline, with a lane per agent and a bar per piece of work, and zooms and pans it.

import { h } from "./dom.js";
import { clock, counted, duration } from "./format.js";
import { button, folded, table } from "./parts.js";
import { linear, timeTicks } from "./scale.js";

const BAR = 14, PAD = 5, TOP = 40, BOTTOM = 8, RIGHT = 12;
/** In pixels: the minimum width of a bar, the space at both ends of a label, the distance of a drag. */
const BAR_MIN = 2, LABEL_MARGIN = 6, DRAG_MIN = 4;
/** The width of a letter in a label, at most, in pixels. */
const LETTER = 7.5;
const ZOOM = 1.5;
const NARROWEST_S = 1;
const ROWS_MAX = 500;
const WORKS = ["generate", "verify", "score", "train", "merge", "evaluate"];
/** Kinds of work differ by pattern as well as by colour. */
const HATCHES = {
  generate: [8, ""], verify: [6, "M0 6L6 0M-1 1L1 -1M5 7L7 5"], score: [5, "M2.5 0V5M0 2.5H5"],
  train: [5, "M0 2.5H5"], merge: [4, "M0 0L4 4"], evaluate: [6, "M3 0V6"],
  pause: [8, "M0 0L8 8M-1 7L1 9M7 -1L9 1"],
};

/** The content of the timeline. Each kind of work has its own line in a lane, because they overlap. */
function layOut({ head, cycles }, nowS) {
  const bars = [...cycles.values()].flatMap(({ cycle, spans }) =>
    spans.map((span) => ({ ...span, cycle, key: `${cycle} ${span.agent} ${span.work} ${span.beginS}` })));
  const lanes = new Map();
  let y = TOP;
  for (const agent of [...new Set([...bars, ...head.troubles].map((it) => it.agent).filter(Boolean))].sort()) {
    const works = WORKS.filter((work) => bars.some((it) => it.agent === agent && it.work === work));
    lanes.set(agent, { y, works });
    y += Math.max(1, works.length) * BAR + 2 * PAD;
  }
  const yOf = ({ agent, work }) => lanes.get(agent).y + PAD + lanes.get(agent).works.indexOf(work) * BAR;
  return { head, bars, lanes, yOf, height: y + BOTTOM, end: Math.max(1, head.endedS ?? Math.max(nowS, head.atS)), cycles: extents(bars) };
}

/** The cycles as [cycle, [begin, end], next], by their begin; `next` is the begin of the next one. */
function extents(bars) {
  const found = new Map();
  for (const { cycle, beginS, endS } of bars) {
    const [from, to] = found.get(cycle) ?? [Infinity, 0];
    found.set(cycle, [Math.min(from, beginS), Math.max(to, endS)]);
  }
  const sorted = [...found].sort(([, [a]], [, [b]]) => a - b);
  return sorted.map(([cycle, extent], at) => [cycle, extent, sorted[at + 1]?.[1][0] ?? Infinity]);
}

/** The outer steps of a bar, of a training on several boxes, such as 3–5; empty for other work. */
const outerSteps = ({ firstOuterStep: first, lastOuterStep: last }) => (!last ? "" : first === last ? `${last}` : `${first}–${last}`);

/** The pauses as [begin, end, description]. A pause ends with the next action, or at `end`. */
const pauses = ({ steered }, end) => steered.flatMap(({ action, atS, reason, by }, at) =>
  (action.toLowerCase() === "pause" ? [[atS, steered[at + 1]?.atS ?? end, `paused${by && ` by ${by}`}: ${reason || "no reason given"}`]] : []));

export function timeline(redraw) {
  const opened = new Set();
  const pointers = new Map();
  /** The visible seconds; null for the whole run, up to its growing end. */
  let range = null;
  let chosen = null;
  let tip = null;
  let all, width, left, x;

  const visibleRange = () => range ?? [0, all.end];
  const timeAt = (px) => linear([left, width - RIGHT], visibleRange())(px);
  const offset = (event) => event.clientX - event.currentTarget.getBoundingClientRect().left;

  function showRange(from, to) {
    const size = Math.max(NARROWEST_S, to - from);
    const start = Math.max(0, Math.min(all.end - size, from));
    range = size >= all.end ? null : [start, start + size];
    redraw();
  }
  /** The middle of the chosen bar if it is visible, otherwise of the range. */
  function center() {
    const [from, to] = visibleRange();
    const bar = all.bars.find(({ key }) => key === chosen);
    return bar && bar.endS > from && bar.beginS < to ? (bar.beginS + bar.endS) / 2 : (from + to) / 2;
  }
  function zoom(by, around = center()) {
    const [from, to] = visibleRange();
    showRange(around - (around - from) / by, around + (to - around) / by);
  }
  function pan(share) {
    const [from, to] = visibleRange();
    showRange(from + (to - from) * share, to + (to - from) * share);
  }
  const showTip = (it) => () => {
    tip = it;
    redraw();
  };
  function choose(bar) {
    chosen = bar.key;
    const [from, to] = visibleRange();
    if (bar.endS < from || bar.beginS > to) showRange(bar.beginS - (to - from) / 2, bar.beginS + (to - from) / 2);
    showTip(bar)();
  }

  /** Chooses the previous or next bar, or the closest one of the agent above or below. */
  function chooseNeighbour(along, across) {
    const from = all.bars.find(({ key }) => key === chosen) ?? all.bars[0];
    if (!from) return;
    const agents = [...all.lanes.keys()];
    const agent = agents[agents.indexOf(from.agent) + across];
    const candidates = all.bars.filter((it) => it.agent === agent).sort((a, b) => a.beginS - b.beginS);
    const distance = (it) => Math.abs(it.beginS - from.beginS);
    const to = across ? candidates.toSorted((a, b) => distance(a) - distance(b))[0] : candidates[candidates.indexOf(from) + along];
    if (to) choose(to);
  }

  const handlers = {
    // The wheel scrolls the page unless the timeline has the focus.
    onwheel(event) {
      const isZooming = event.ctrlKey || event.currentTarget.contains(document.activeElement);
      if (range && Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / width);
      else if (isZooming) zoom(1.002 ** -event.deltaY, timeAt(offset(event)));
      else return;
      event.preventDefault();
    },
    onpointerdown(event) {
      if (!event.button) pointers.set(event.pointerId, offset(event));
      event.currentTarget.focus({ preventScroll: true });
    },
    onpointermove(event) {
      const { currentTarget: svg, pointerId } = event;
      if (!pointers.has(pointerId) || (!svg.hasPointerCapture(pointerId) && Math.abs(offset(event) - pointers.get(pointerId)) < DRAG_MIN)) return;
      svg.setPointerCapture(pointerId);
      const [a, b] = pointers.values();
      pointers.set(pointerId, offset(event));
      const [c, d] = pointers.values();
      if (b === undefined) pan((a - c) / (width - left - RIGHT));
      else zoom(Math.max(0.5, Math.min(2, Math.abs(c - d) / Math.max(8, Math.abs(a - b)))), timeAt((c + d) / 2));
    },
    onpointerup: (event) => pointers.delete(event.pointerId),
    onpointercancel: (event) => pointers.delete(event.pointerId),
    onkeydown(event) {
      const { key, shiftKey } = event;
      const actions = {
        "+": () => zoom(ZOOM), "=": () => zoom(ZOOM), "-": () => zoom(1 / ZOOM), 0: () => showRange(0, all.end), Escape: showTip(null),
        ArrowLeft: () => (shiftKey ? pan(-0.2) : chooseNeighbour(-1, 0)), ArrowRight: () => (shiftKey ? pan(0.2) : chooseNeighbour(1, 0)),
        ArrowUp: () => chooseNeighbour(0, -1), ArrowDown: () => chooseNeighbour(0, 1),
      };
      if (!actions[key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[key]();
    },
  };

  const when = (seconds) => clock(Date.parse(all.head.submittedAt) + seconds * 1000, Date.now());
  const describe = (it) => (it.what
    ? `${it.what}: ${it.message}; ${it.agent}, ${when(it.atS)}${it.final ? "; no more retries" : ""}`
    : `${it.agent}: ${it.work}, cycle ${it.cycle}${outerSteps(it) && `, outer step ${outerSteps(it)}`}, ${counted(it.count, "item")}; `
      + `${duration(it.endS - it.beginS)}, ${when(it.beginS)} – ${when(it.endS)}`);

  const startOf = (bar) => Math.max(left, x(bar.beginS));
  /** The bars that intersect the range, each with the start of the next one in its line. */
  function visibleBars([from, to]) {
    const visible = all.bars.filter(({ beginS, endS }) => endS >= from && beginS <= to).sort((a, b) => b.beginS - a.beginS);
    const next = new Map();
    return visible.map((bar) => {
      const before = next.get(all.yOf(bar)) ?? Infinity;
      next.set(all.yOf(bar), startOf(bar));
      return [bar, before];
    }).reverse();
  }

  const bars = (seconds) => visibleBars(seconds).map(([bar, next]) => {
    const start = startOf(bar);
    const size = Math.max(BAR_MIN, Math.min(width - RIGHT, x(bar.endS)) - start);
    const room = Math.min(size, next - start) - 2 * LABEL_MARGIN;
    const rect = { x: start, y: all.yOf(bar), width: size, height: BAR - 1, rx: 2 };
    const label = [`${bar.work} ${outerSteps(bar)}`.trim(), bar.work].find((it) => it.length * LETTER <= room);
    // Without a pattern behind it, a label is easy to read.
    const plain = label ? label.length * LETTER + LABEL_MARGIN : 0;
    return h(`g.bar.${bar.work}`, {
      key: bar.key, class: bar.key === chosen && "chosen", "data-agent": bar.agent, "data-work": bar.work,
      "data-cycle": bar.cycle, onpointerenter: showTip(bar), onpointerleave: showTip(null), onclick: () => choose(bar),
    },
    h("rect.solid", rect), h("rect", { ...rect, x: start + plain, width: size - plain, fill: `url(#hatch-${bar.work})` }),
    label && h("text", { x: start + LABEL_MARGIN, y: rect.y + 10 }, label));
  });

  function background([from, to]) {
    const bottom = all.height - BOTTOM;
    // A label has its place between its line and the next one.
    const cycleLabel = (start, cycle, next) => {
      const room = Math.min(width - RIGHT, x(next)) - start - LABEL_MARGIN;
      const text = [`cycle ${cycle}`, String(cycle)].find((it) => it.length * LETTER <= room);
      return text && h("text.label", { x: start + 4, y: 32 }, text);
    };
    const within = (list, draw) => list.filter(([a, b]) => b >= from && a <= to).map(([a, b, more]) => {
      const start = Math.max(left, x(a));
      return draw(start, Math.max(1, Math.min(width - RIGHT, x(b)) - start), more);
    });
    const rect = (start, size) => ({ x: start, y: TOP, width: size, height: bottom - TOP });
    return h("g",
      within(all.cycles.map(([cycle, [a, b], next]) => [a, Math.min(b, next), { cycle, next }]), (start, size, { cycle, next }) => [
        cycle % 2 === 1 && h("rect.cycle", rect(start, size)), h("line.axis.begin", { x1: start, x2: start, y1: 20, y2: bottom }),
        cycleLabel(start, cycle, next)]),
      timeTicks(visibleRange(), (width - left) / 90).map((at) => [h("line.axis", { x1: x(at), x2: x(at), y1: TOP, y2: bottom }),
        h("text", { x: x(at), y: 13, "text-anchor": x(at) > width - 40 ? "end" : "middle" }, at ? duration(at) : "0")]),
      within(pauses(all.head, all.end), (start, size, description) => h("g", h("rect", { ...rect(start, size), fill: "url(#hatch-pause)" }),
        h("title", description), size > 44 && h("text.why", { x: start + 3, y: bottom - 3 }, "paused"))),
      [...all.lanes].map(([agent, { y }]) => h("text.ink", { x: 4, y: y + 16 },
        agent.length * 7 > left - 6 ? `${agent.slice(0, Math.floor(left / 7) - 2)}…` : agent, h("title", agent))));
  }

  const troubles = () => all.head.troubles.filter((it) => x(it.atS) >= left && x(it.atS) <= width).map((it) =>
    h("path.trouble", {
      class: it.final && "final", d: `M${x(it.atS)} ${all.lanes.get(it.agent)?.y ?? TOP}l6 11h-12z`,
      onpointerenter: showTip(it), onpointerleave: showTip(null),
    }));

  const swatch = (work) => h("li", { class: work }, h("svg", { width: 22, height: 12, "aria-hidden": "true" },
    h("rect.solid", { width: 22, height: 12 }), h("rect", { width: 22, height: 12, fill: `url(#hatch-${work})` })), work);
  const hatches = () => h("defs", Object.entries(HATCHES).map(([name, [size, d]]) =>
    h("pattern", { id: `hatch-${name}`, width: size, height: size, patternUnits: "userSpaceOnUse" }, h("path.hatch", { d }))));

  return function draw(board, nowS, wide) {
    all = layOut(board, nowS);
    [width, left] = [wide - 2, wide < 600 ? 86 : 124];
    x = linear(visibleRange(), [left, width - RIGHT]);
    const now = x(all.end);
    const rows = () => all.bars.slice(-ROWS_MAX).reverse().map((it) =>
      [it.agent, it.work, it.cycle, when(it.beginS), duration(it.endS - it.beginS), it.count]);
    return h("div.panel",
      h("div.tools", h("ul.legend.works", WORKS.map(swatch)),
        h("span.end", button("−", () => zoom(1 / ZOOM), { "aria-label": "zoom out" }),
          button("+", () => zoom(ZOOM), { "aria-label": "zoom in" }), button("Show all", () => showRange(0, all.end), { disabled: !range }))),
      h("div.scrolled", h("svg.timeline", { width, height: all.height, tabindex: 0, role: "application", ...handlers,
        "aria-label": `Timeline of ${counted(all.lanes.size, "agent")} over ${duration(all.end)}` },
      hatches(), background(visibleRange()), h("g", bars(visibleRange())), troubles(),
      board.head.endedS === null && now <= width && h("line.now", { x1: now, x2: now, y1: 18, y2: all.height - BOTTOM }))),
      h("p.note.told", { role: "status" }, tip ? describe(tip) : !chosen
        && "Arrow keys select a bar, + and − zoom, 0 shows everything; drag to pan."),
      folded("table", "Show as table", { opened, redraw }, () =>
        table("Work of each agent, newest first", ["agent", "work", "cycle", "start", "duration", "items"], rows())));
  };
}
