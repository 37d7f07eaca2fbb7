// Shows a run: its progress, timeline, metrics, checkpoints, problems and settings.

import { follow, now } from "./api.js";
import { chartState, columnChart, lineChart } from "./chart.js";
import { h } from "./dom.js";
import { clock, count, counted, decimal, duration, ending, place } from "./format.js";
import { lineage } from "./lineage.js";
import { button, callout, chip, empty, folded, note, progress, section, settingsTable, state } from "./parts.js";
import { toBox, toSamples } from "./route.js";
import { axisOf, charts, fates, ratios, rewards, stopsOf } from "./series.js";
import { settingsOf } from "./spec.js";
import { isOver, mergeBoard, originOf } from "./store.js";
import { timeline } from "./timeline.js";

const PHASES = ["plan", "generate", "verify", "select", "train", "evaluate"];
const THEN = { TELL: "warning only", ROLL_BACK: "rolled back to the best checkpoint", STOP: "run stopped" };
const CYCLES_DRAWN = 40;

/** Follows the boards of runs until all have ended. Returns {boards, failure}, updated in place. */
export function followBoards(runs, { page, signal }) {
  const followed = { boards: new Map(), failure: null };
  // The runs whose complete board was received on this connection.
  const complete = new Set();
  follow("Runs/Board", { runs }, {
    signal,
    onMessage(update, first) {
      if (first) complete.clear();
      const { run } = update.head;
      followed.boards.set(run, mergeBoard(followed.boards.get(run), update, !complete.has(run)));
      complete.add(run);
      page.redraw();
    },
    isOver: () => runs.every((run) => isOver(followed.boards.get(run)?.head.state ?? "running")),
    onFailure(error) {
      followed.failure = error.message;
      page.redraw();
    },
  });
  return followed;
}

export function open({ page, route, signal }) {
  const followed = followBoards([route.id], { page, signal });
  const opened = new Set();
  const drawTimeline = timeline(page.redraw);
  const drawLineage = lineage(page.redraw);
  const shared = chartState(page);
  const boardNow = () => followed.boards.get(route.id);

  const title = () => {
    const { name, state: word, phase, done, total } = boardNow()?.head ?? {};
    const progressText = word === "running" && total ? `${Math.round((done / total) * 100)} % ${phase}` : word;
    return [progressText, name || route.id].filter(Boolean).join(" ");
  };

  const draw = () => {
    const board = boardNow();
    if (!board) return empty(followed.failure ?? `Loading ${route.id} …`, " ", h("a", { href: "#/" }, "All runs"));
    const settings = settingsOf(board.spec);
    return [
      header({ ...board.head, message: board.head.message || page.fleet.runs.get(route.id)?.message }, page),
      section("timeline", "Timeline", drawTimeline(board, (now() - Date.parse(board.head.submittedAt)) / 1000, page.width())),
      section("learning", "Learning", learning(board, shared)),
      section("checkpoints", "Checkpoints", drawLineage(board)),
      section("troubles", "Problems", troubles(board.head)),
      section("settings", "Settings", folded("settings", `Show ${counted(settings.length, "setting")}`, { opened, redraw: page.redraw },
        () => settingsTable("Settings", ["setting", "value"], settings))),
    ];
  };
  return { title, draw, ticks: true };
}

function header(head, page) {
  const { run, name, kind, state: word, message, phase, done, total, unit } = head;
  const submitted = Date.parse(head.submittedAt);
  const over = isOver(word);
  const act = (when, action, label) => when && page.may()
    && button(label, () => page.steer[action](run, name), { key: action, "data-action": action });
  return h("header.panel", { "data-run": run, "data-state": word, "data-cycle": head.cycle, "data-phase": phase },
    h("div.tools", h("h1", name || run, h("small", run)), state(word), chip(kind, "soft"),
      h("span.end", kind === "raft" && h("a.button", { href: toSamples(run, { cycle: head.cycle }) }, "Samples"),
        act(word === "running" || word === "queued", "pause", "Pause"),
        act(word === "paused" || word === "queued", "resume", word === "queued" ? "Run now" : "Resume"), act(!over, "cancel", "Cancel"))),
    message && word !== "paused" && callout(word === "failed" ? "bad" : "", word === "failed" ? "✕" : "›", message),
    !over && [steps(head),
      total > 0 && h("p.phase", progress(`${phase} of cycle ${head.cycle}`, done, total),
        h("b", `${count(done)} of ${count(total)} ${unit}`)),
      h("p", etas(head))],
    note([originOf(page.fleet.runs.get(run) ?? {}), `submitted ${clock(submitted, now())}, `].filter(Boolean).join(", "),
      over ? `took ${duration(head.endedS ?? head.atS)}` : `running for ${duration((now() - submitted) / 1000)}`));
}

/** The cycles as a row of marks, and the phases of the current cycle. */
function steps({ cycle, cycles, phase, state: word, kind }) {
  // Cycle 0 of a RAFT run only evaluates the base.
  const shown = kind !== "raft" ? PHASES.slice(-2) : cycle ? PHASES : ["evaluate"];
  const is = (at, here) => (at < here ? "past" : at === here ? "here" : "");
  return h("div.steps", { class: `is-${word}` },
    cycles > 0 && h("p", h("b", cycle ? `cycle ${cycle} of ${cycles} ` : "evaluating the base "),
      cycles <= CYCLES_DRAWN && Array.from({ length: cycles }, (_, at) => h("i", { class: is(at + 1, cycle) }))),
    h("ol", shown.map((it) =>
      h("li", { class: is(PHASES.indexOf(it), PHASES.indexOf(phase)), "aria-current": it === phase && "step" }, it))));
}

function etas({ state: word, steered, runEnds, phaseEnds, phase, submittedAt }) {
  if (word === "paused") {
    const { by, reason } = steered.at(-1) ?? { by: "", reason: "" };
    return `Paused${by && ` by ${by}`}${reason && `: ${reason}`}. No new jobs start.`;
  }
  if (word === "queued") return "No new jobs start before its turn.";
  const run = ending(runEnds, submittedAt, now());
  const step = ending(phaseEnds, submittedAt, now());
  if (!run && !step) return "No estimate of the end yet.";
  return [run && h("b", { title: "The range is a 90 % interval." }, run),
    run && step && " · ", step && `${phase} ${step}`];
}

function learning(board, share) {
  const lineCharts = charts(board);
  const columnCharts = [rewards(board), fates(board), ratios(board)].filter(({ all }) => all.length);
  if (!lineCharts.length && !columnCharts.length) return empty("No measurements yet: the base is evaluated first.");
  const cycles = [...board.cycles.values()];
  const [axis, stops] = [axisOf(board), stopsOf(board)];
  const shared = share(axis, stops, axis === "cycle" ? cycles.findLast((it) => it.done)?.cycle ?? 0 : stops.at(-1) ?? 0);
  const [first, ...others] = lineCharts.map((chart) => lineChart(chart, shared));
  return [
    stops.length > 1 && picker(board, shared),
    h("ul", cycles.flatMap(({ cycle, done }) =>
      (done?.findings ?? []).map((it) => h("li", { "data-cycle": cycle }, finding(cycle, it))))),
    h("div.charts", first, columnCharts.map((chart) => columnChart(chart, shared)), others),
  ];
}

/** A slider that moves the cursor of all charts. */
function picker(board, { axis, stops, cursor, setCursor }) {
  const cycle = Math.ceil(cursor - 1e-9);
  return h("div.picker", h("label", h("b", `${axis} ${place(cursor)}`), h("input", {
    type: "range", min: 0, max: stops.length - 1, value: stops.findLastIndex((it) => it <= cursor),
    "aria-label": `${axis} shown in the charts`, "data-cycle": cycle, oninput: ({ target }) => setCursor(stops[target.value]),
  })),
  axis === "cycle" && board.cycles.has(cycle) && h("a", { href: toSamples(board.head.run, { cycle }) }, `samples of cycle ${cycle}`));
}

const finding = (cycle, { gate, then, value, limit, best }) =>
  callout(then === "TELL" ? "warn" : "bad", then === "ROLL_BACK" ? "↩" : "▲", h("b", `Cycle ${cycle}, gate on ${gate}: `),
    `${decimal(value)}, limit ${decimal(limit)}, best ${decimal(best)}; ${THEN[then] ?? then}.`);

function troubles({ troubles: all, troublesInAll, submittedAt }) {
  if (!troublesInAll) return note("None.");
  // Equal problems are shown once, with the time of the newest.
  const groups = Map.groupBy(all.toReversed(), (it) => [it.agent, it.message, it.final].join("\n"));
  return [
    [...groups.values()].map(([it, ...others]) => h("div.callout", { class: it.final ? "bad" : "warn" },
      h("time", clock(Date.parse(submittedAt) + it.atS * 1000, now())),
      h("span", h("b", it.what, others.length > 0 && ` and ${count(others.length)} more`), " ", it.agent && h("a", { href: toBox(it.agent) }, it.agent),
        it.final && " (no more retries)", `: ${it.message}`))),
    troublesInAll > all.length && note(`Showing the last ${count(all.length)} of ${count(troublesInAll)}.`),
  ];
}
