// Shows the fleet: a list of runs, and the agents as cards or, if there are many, as rows.

import { now } from "./api.js";
import { card, hostHead, row, searchText } from "./box.js";
import { channelSection, pollChannels } from "./channels.js";
import { h, lazy } from "./dom.js";
import { clock, compact, count, counted, duration, percent } from "./format.js";
import { button, empty, progress, quiet, section, state } from "./parts.js";
import { toCompare, toRun } from "./route.js";
import { linear } from "./scale.js";
import { byHost, fleetTotals, newestFirst, originOf, progressOf, stateOf } from "./store.js";

const CARDS_MAX = 24;
const RUNS_SHOWN = 12;
const COMPARED_MAX = 8;
/** Four minutes of the fleet's rate. */
const RATES_MAX = 120, RATE_INTERVAL_MS = 2000;

/** Survives a change of the view. */
const rates = [];

export function open({ page, signal }) {
  let filter = "";
  let allRuns = false;
  const compared = new Set();
  const visibility = trackVisibility(page.redraw, signal);
  const polled = pollChannels({ page, signal });
  const timer = setInterval(recordRate, RATE_INTERVAL_MS);
  signal.addEventListener("abort", () => clearInterval(timer));

  function recordRate() {
    rates.push(fleetTotals(page.fleet.agents, now()).tokensPerS);
    if (rates.length > RATES_MAX) rates.shift();
  }

  function runs() {
    const list = newestFirst(page.fleet.runs);
    if (!list.length) {
      return page.isLoaded && empty("No runs yet. Submit one with ", h("code", "flotilla run submit SPEC"),
        page.may() && " or with Start", ".");
    }
    const shown = allRuns ? list : list.slice(0, RUNS_SHOWN);
    const minute = Math.floor(now() / 60_000);
    return [
      h("div.runs", shown.map((run) => lazy(run.run, [run, compared.has(run.run), minute], () => runRow(run)))),
      list.length > RUNS_SHOWN && quiet(allRuns ? "Show newest only" : `Show all ${count(list.length)}`, toggle),
    ];
  }

  function toggle() {
    allRuns = !allRuns;
    page.redraw();
  }

  function runRow(run) {
    const share = progressOf(run);
    const submitted = Date.parse(run.submittedAt);
    const note = run.message || originOf(run);
    const onchange = ({ currentTarget }) => {
      compared[currentTarget.checked && compared.size < COMPARED_MAX ? "add" : "delete"](run.run);
      page.redraw();
    };
    return h("article.run", { "data-run": run.run, "data-state": run.state, "data-row": true },
      h("label.choose", h("input", { type: "checkbox", checked: compared.has(run.run), onchange, "aria-label": `compare ${run.run}` })),
      h("a", { href: toRun(run.run) }, h("b", run.name || run.run), h("small", run.run)), state(run.state), h("span.soft.kind", run.trialOf ? "trial" : run.kind),
      h("span.far", share !== null && [progress(`cycles of ${run.run}`, share, 1),
        h("small", `${Math.max(0, run.cyclesDone - 1)} of ${counted(run.cycles, "cycle")}`)]),
      h("span.far.heldout", heldOut(run)),
      h("time.soft", { datetime: run.submittedAt, title: clock(submitted, now()) },
        run.endedAt ? `took ${duration((Date.parse(run.endedAt) - submitted) / 1000)}` : `${duration((now() - submitted) / 1000)} ago`),
      note && h("small.far", note));
  }

  function boxes(total) {
    const all = [...page.fleet.agents.values()];
    if (!all.length) {
      return page.isLoaded && empty("No agents yet. Start one on this machine with ", h("code", "flotilla agent"), ", or on another machine with ",
        h("code", "flotilla join"), " and the fleet’s join token.");
    }
    const words = filter.toLowerCase().split(/\s+/);
    const matching = all.filter((agent) => words.every((word) => searchText(agent).includes(word)));
    const [render, name] = total.boxes > CARDS_MAX ? [row, "rows"] : [card, "cards"];
    const lazyAgent = (isShared) => (agent) =>
      lazy(agent.agent, [agent, stateOf(agent, now()), isShared], () => render(agent, { ref: visibility.observe }, isShared), visibility.isOffscreen);
    // Agents of one host are one machine: its load is shown once.
    const groups = total.boxes > CARDS_MAX ? [["", matching]] : byHost(matching);
    const shares = groups.some(([, agents]) => agents.length > 1) && total.boxes <= CARDS_MAX;
    return [
      groups.map(([host, agents]) => [shares && hostHead(host, agents), h(`div.${name}`, agents.map(lazyAgent(shares)))]),
      !matching.length && empty(`None of ${count(all.length)} agents matches “${filter}”.`),
    ];
  }

  const filterBy = (text) => {
    filter = text;
    page.redraw();
  };
  const filters = ({ boxes: n, concerns }) => n > 1 && [
    h("input", {
      type: "search", placeholder: "filter: name, role, run, state …", "aria-label": "Filter agents", "data-filter": true,
      value: filter, oninput: ({ target }) => filterBy(target.value),
    }),
    concerns.map((word) =>
      quiet(word, () => filterBy(filter === word ? "" : word), { key: word, "aria-pressed": String(filter === word) })),
  ];

  const draw = () => {
    const total = fleetTotals(page.fleet.agents, now());
    return [
      summary(total, page.fleet.runs, page.isLoaded),
      section("runs", "Runs", h("div.tools", compared.size === 1 && h("small", "Select another run to compare"),
        compared.size > 1 && h("a.button", { href: toCompare([...compared]) }, `Compare ${compared.size}`),
        page.may() && button("Start …", () => page.steer.start(), { "data-action": "start" })), runs()),
      channelSection(polled),
      section("boxes", "Agents", h("div.tools", filters(total)), boxes(total)),
    ];
  };
  return { title: () => "", draw, ticks: true };
}

/** The held-out pass rates of the best and the last cycle; one line if they are the same. */
function heldOut({ heldout: last, bestHeldout: best, bestCycle, cyclesDone }) {
  const line = (label, { mean, stderr }) =>
    h("span", h("small", `${label} `), h("span.figure", h("b", percent(mean)), h("small", ` ± ${(stderr * 100).toFixed(1)}`)));
  const isLast = bestCycle === cyclesDone - 1;
  return last && [
    best && !isLast && line("held-out, best", best),
    line(best && isLast ? "held-out, best and last" : "held-out, last", last),
  ];
}

const tile = (value, unit, more) => h("div.tile", h("b", value), h("span", unit), more);

function summary(total, runs, isLoaded) {
  const working = [...runs.values()].filter((it) => it.state === "running").length;
  // Before the first data, none of the numbers is known.
  if (!isLoaded) return h("h1.unseen", "The fleet");
  return h("div.summary", h("h1.unseen", "The fleet"),
    tile(count(total.online) + (total.online < total.boxes ? ` of ${count(total.boxes)}` : ""),
      total.boxes === 1 ? "agent online" : "agents online"),
    tile(count(working), working === 1 ? "run active" : "runs active"),
    tile(compact(total.tokensPerS), "tokens/s", spark()), total.watts > 0 && tile(compact(total.watts), "W"),
    total.concerned > 0 && tile(h("span.why", `⚠ ${count(total.concerned)}`),
      total.concerned === 1 ? "agent needs attention" : "agents need attention"));
}

function spark() {
  const x = linear([0, RATES_MAX - 1], [0, 120]);
  const y = linear([0, Math.max(1, ...rates)], [29, 3]);
  const points = rates.map((rate, at) => `${x(RATES_MAX - rates.length + at).toFixed(1)} ${y(rate).toFixed(1)}`);
  // A few points would be a single slanted stroke.
  return points.length > 10 && h("svg.spark", { width: 120, height: 30, role: "img", "aria-label": "tokens/s over the last four minutes" },
    h("path.curve.s0", { d: `M${points.join("L")}` }));
}

/** Tracks which nodes are off the screen; they are redrawn when they become visible. */
function trackVisibility(redraw, signal) {
  const offscreen = new WeakSet();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) offscreen[isIntersecting ? "delete" : "add"](target);
    redraw();
  }, { rootMargin: "200px" });
  signal.addEventListener("abort", () => observer.disconnect());
  return { observe: (node) => observer.observe(node), isOffscreen: (node) => offscreen.has(node) };
}
