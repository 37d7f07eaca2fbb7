// Compares runs: their results and curves side by side, and the settings that differ.

import { bestOf } from "./ancestry.js";
import { chartState, lineChart } from "./chart.js";
import { h } from "./dom.js";
import { passRate } from "./format.js";
import { empty, note, quiet, section, settingsTable, state, table } from "./parts.js";
import { toCompare, toRun } from "./route.js";
import { followBoards } from "./run.js";
import { axisOf, mergedCharts, stopsOf } from "./series.js";
import { differences } from "./spec.js";
import { newestFirst } from "./store.js";

const RUNS_MAX = 8;

export function open({ page, route, signal }) {
  const runs = [...new Set(route.id.split(",").filter(Boolean))].slice(0, RUNS_MAX);
  const followed = followBoards(runs, { page, signal });
  const [shared, sharedSteps] = [chartState(page), chartState(page)];

  function runPicker() {
    const others = newestFirst(page.fleet.runs).filter(({ run }) => !runs.includes(run));
    const onchange = ({ currentTarget }) => page.go(toCompare([...runs, currentTarget.value]));
    return h("div.tools", runs.map((run) => h("span.chip", { key: run, "data-run": run }, h("a", { href: toRun(run) }, run), " ",
      runs.length > 1 && quiet("×", () => page.go(toCompare(runs.filter((it) => it !== run))), { "aria-label": `remove ${run}` }))),
    runs.length < RUNS_MAX && others.length > 0 && h("select", { "aria-label": "add a run to compare", onchange },
      h("option", { value: "" }, "Add a run …"), others.map(({ run, name }) => h("option", { value: run }, `${run} ${name}`))));
  }

  function charts(known) {
    // Cycles and steps have charts of their own, because they are no common axis.
    const axes = ["cycle", "step"].filter((axis) => known.some((board) => axisOf(board) === axis));
    return axes.map((axis) => {
      const boards = known.filter((board) => axisOf(board) === axis);
      const stops = [0, ...new Set(boards.flatMap(stopsOf).filter(Boolean))].sort((a, b) => a - b);
      const chartsOf = axis === "cycle" ? shared : sharedSteps;
      return [axes.length > 1 && h("h3", `By ${axis}`),
        h("div.charts", { "data-axis": axis }, mergedCharts(boards, known).map((chart) => lineChart(chart, chartsOf(axis, stops, stops.at(-1)))))];
    });
  }

  function results(known) {
    const lastDone = (read) => known.map((board) => {
      const last = [...board.cycles.values()].findLast(({ done }) => done);
      return last ? read(last) : "–";
    });
    return table("Metrics", ["", ...known.map(({ head }) => head.run)], [
      ["name", ...known.map(({ head }) => head.name)],
      ["state", ...known.map(({ head }) => state(head.state))],
      ["best cycle", ...known.map((board) => (board.head.cycles ? bestOf(board) ?? "–" : "–"))],
      ["held-out pass rate, best cycle", ...known.map((board) => rate(board.cycles.get(bestOf(board))?.done?.heldout))],
      ["held-out pass rate, last cycle", ...lastDone(({ done }) => rate(done.heldout))],
      ["kept in the last cycle", ...lastDone(({ selected: it }) => (it ? `${it.kept} of ${it.considered}` : "–"))],
    ]);
  }

  const rate = (it) => (it ? passRate(it) : "–");

  const draw = () => {
    const known = runs.map((run) => followed.boards.get(run)).filter(Boolean);
    const differing = differences(known.map(({ spec }) => spec));
    return [
      h("h1", "Compare"), runPicker(),
      followed.failure && empty(followed.failure),
      known.length ? [
        section("metrics", "Metrics", results(known)),
        section("learning", "Learning", charts(known)),
        section("differences", "Settings that differ", differing.length
          ? settingsTable("Settings that differ", ["setting", ...known.map(({ head }) => head.run)], differing)
          : note(known.length > 1 ? "None: the settings are the same." : "Select another run to compare.")),
      ] : !followed.failure && empty("Loading runs …"),
    ];
  };
  return { title: () => "compare", draw };
}
