// Shows an agent: as a card, as a row, and as a view of its own.

import { now } from "./api.js";
import { h } from "./dom.js";
import { bytes, compact, count, counted, duration, percent, withUnit } from "./format.js";
import { button, callout, chip, empty, facts, meter, note, progress, state, table } from "./parts.js";
import { toBox, toRun } from "./route.js";
import { concerns, secondsSinceSeen, stateOf } from "./store.js";

/** Warn within this many degrees of the critical temperature, and above this share of a memory. */
const NEAR_CRITICAL = 10;
const FULL = 0.92;

const isHot = (it) => it.critical !== null && it.celsius > it.critical - NEAR_CRITICAL;
const hottest = ({ temperatures }) => temperatures.toSorted((a, b) => b.celsius - a.celsius)[0];
const heat = (it) => it && `${Math.round(it.celsius)}${it.critical ? ` of ${it.critical}` : ""} °C${isHot(it) ? " ▲" : ""}`;

/** `GPU 97 % 71 °C`, as in the terminal; the CPU if there is no GPU. */
function utilization({ telemetry: it }) {
  if (!it) return "–";
  if (!it.gpus.length) return it.cpuBusy === null ? "–" : `CPU ${percent(it.cpuBusy, 0)}`;
  return it.gpus.map((gpu) => (gpu.asleep ? "GPU asleep"
    : ["GPU", withUnit(gpu.busyPercent, "%"), hottest(gpu) && withUnit(hottest(gpu).celsius, "°C")].filter(Boolean).join(" "))).join(", ");
}

const jobOf = (job) => h("li", { key: job.role + job.job, class: job.waits && "waits" },
  h("span", h("a", { href: toRun(job.run) }, job.run), ` cycle ${job.cycle}: ${job.role} ${job.job}`),
  h("span.far", job.waits ? "waiting for another agent" : `${job.total ? `${job.done}/${job.total}` : ""} ${job.note}`),
  progress(job.job, job.done, job.total));

function storm({ telemetry }) {
  const { level, cause, reaction, storms } = telemetry?.storm ?? {};
  if (level !== "WARN" && level !== "STORM") return null;
  return callout(level === "STORM" ? "bad" : "warn", "≈", h("b", level === "STORM" ? "TLB storm: " : "TLB shootdowns are high: "), cause,
    reaction && h("em", `. Reaction: ${reaction}`), `; ${counted(storms, "storm")} since the agent started.`);
}

const callouts = (agent) => [
  agent.trouble && callout("bad", "⚠", agent.trouble),
  storm(agent),
  agent.withheld.map((it) => callout("warn", "⊘", h("b", `${it.role} withheld, ${it.finding}: `), `${it.seen}. `, h("em", it.remedy))),
  agent.telemetry?.warnings.map((text) => callout("warn", "▲", text)),
  agent.telemetry?.resting && callout("", "☾", `paused by the owner’s limits: ${agent.telemetry.resting}`),
];

const filled = (name, used, total) => total > 0
  && meter(name, used / total, `${bytes(used)} of ${bytes(total)}`, used / total > FULL && "warn");

function gpuMeters(gpu) {
  const status = gpu.asleep ? "asleep" : [heat(hottest(gpu)), withUnit(gpu.watts, "W")].filter(Boolean).join(" · ");
  // An integrated GPU uses system memory that is mapped by the GTT.
  const mapped = gpu.integrated && gpu.gttTotal > gpu.vramTotal;
  return [
    h("p.gpu", h("b", `${gpu.integrated ? "iGPU" : "GPU"} ${gpu.ordinal} ${gpu.gfx}`), ` ${status}`),
    !gpu.asleep && gpu.busyPercent !== null && meter("busy", gpu.busyPercent / 100, withUnit(gpu.busyPercent, "%")),
    !gpu.asleep && (mapped ? filled("GTT", gpu.gttUsed, gpu.gttTotal) : filled("VRAM", gpu.vramUsed, gpu.vramTotal)),
  ];
}

const meters = ({ telemetry: it, cpus }) => it && h("div.meters", it.gpus.map(gpuMeters),
  it.cpuBusy !== null && meter("CPU", it.cpuBusy, `${percent(it.cpuBusy, 0)} of ${cpus} cores`),
  filled("memory", it.memoryTotal - it.memoryAvailable, it.memoryTotal));

/** The head of the agents of one host, with the host's meters as its newest agent reports them. */
export function hostHead(host, agents) {
  const newest = agents.toSorted((a, b) => b.seenAt.localeCompare(a.seenAt))[0];
  return h("header.host", { key: `host ${host}`, "data-host": host },
    h("h3", host || "unnamed host", h("small", ` ${counted(agents.length, "agent")}`)), meters(newest));
}

const boxAttributes = (agent, more) => ({ key: agent.agent, "data-agent": agent.agent, "data-state": stateOf(agent, now()),
  "data-storm": agent.telemetry?.storm?.level, "data-row": true, class: concerns(agent, now()).length && "concerned", ...more });

const rated = (value, unit) => h("span", h("b", value || "–"), ` ${unit}`);
const lastSeen = (agent) => duration(secondsSinceSeen(agent, now()));

/** `isShared`: the meters of its host are shown once for all agents of the host. */
export const card = (agent, more, isShared = false) => h("article.box", boxAttributes(agent, more),
  h("header", h("h3", h("a", { href: toBox(agent.agent) }, agent.agent)), state(stateOf(agent, now())),
    stateOf(agent, now()) === "gone" && h("small", `last seen ${lastSeen(agent)} ago`)),
  h("p.chips", agent.roles.map((role) => chip(role)), chip(agent.profile || "no profile", "soft", agent.engines.join("\n")),
    agent.pool && chip(`pool ${agent.pool}`, "soft")),
  callouts(agent),
  h("p.rates", agent.roles.includes("generator") && rated(agent.jobs.length > 0 && agent.tokensPerS && compact(agent.tokensPerS), "tokens/s"),
    Number.isFinite(agent.telemetry?.watts) && rated(count(agent.telemetry.watts), "W"), rated(count(agent.jobsDone), "jobs done")),
  !isShared && meters(agent), agent.jobs.length ? h("ul.jobs", agent.jobs.map(jobOf)) : note("No jobs."));

export function row(agent, more) {
  const [concern] = concerns(agent, now());
  const work = agent.jobs.find((job) => !job.waits);
  const reason = () => agent.trouble || agent.withheld[0]?.seen || agent.telemetry?.storm?.cause || agent.telemetry?.warnings[0];
  return h("article.box.row", boxAttributes(agent, more), h("a", { href: toBox(agent.agent) }, agent.agent), state(stateOf(agent, now())),
    h("span.soft", agent.roles.join(", ")), h("span", utilization(agent)),
    h("span.rate", agent.tokensPerS > 0 && `${compact(agent.tokensPerS)} tokens/s`),
    concern ? h("span.why", `⚠ ${concern === "gone" ? `last seen ${lastSeen(agent)} ago` : reason()}`)
      : h("span.work", work && [`${work.run} ${work.role} `, progress(work.job, work.done, work.total)]));
}

/** The lower-case text that filters search. */
export const searchText = (agent) => [agent.agent, agent.host, agent.pool, agent.profile, ...agent.roles, ...agent.jobs.map((job) => job.run),
  stateOf(agent, now()), ...concerns(agent, now())].join(" ").toLowerCase();

function details(agent) {
  const { telemetry: it, exchange } = agent;
  const waits = (pressure) => pressure && `${pressure.someAvg10.toFixed(1)} % of the last 10 s`;
  return facts([
    ["host", agent.host], ["version", agent.version], ["engines", agent.engines.join("; ")], ["abilities", agent.abilities.join(", ")],
    ["uptime", agent.startedAt && duration((now() - Date.parse(agent.startedAt)) / 1000)], ["last seen", `${lastSeen(agent)} ago`],
    ["agent memory", bytes(agent.rssBytes)], ["memory for training", agent.trainingBytes && bytes(agent.trainingBytes)],
    ["time per sample", agent.sampleS && duration(agent.sampleS)], ["energy", it?.joules && `${(it.joules / 3.6e6).toFixed(2)} kWh`],
    ["CPU pressure", waits(it?.cpuPressure)], ["I/O pressure", waits(it?.ioPressure)], ["memory pressure", waits(it?.memoryPressure)],
    ["TLB shootdowns", it && withUnit(it.tlbShootdownsPerS, "per second")], ["TLB storms", it?.storm && `${it.storm.storms} since the agent started`],
    ["swap", it?.swapTotal && `${bytes(it.swapTotal - it.swapFree)} of ${bytes(it.swapTotal)}`],
    ["files from the store", exchange && bytes(exchange.bytesFromStore)],
    ["files from / to peers", exchange && `${bytes(exchange.bytesFromPeers)} / ${bytes(exchange.bytesToPeers)}`],
  ]);
}

const sensors = (gpu) => gpu.temperatures.length > 0 && table(`Sensors of GPU ${gpu.ordinal}`, [`GPU ${gpu.ordinal}`, "now", "critical"], [
  ...gpu.temperatures.map((it) =>
    [it.sensor, `${it.celsius.toFixed(0)} °C${isHot(it) ? " ▲ near critical" : ""}`, withUnit(it.critical, "°C")]),
  ...gpu.clocks.map((it) => [it.sensor, `${count(it.hertz / 1e6)} MHz`, ""]),
]);

export function open({ page, route }) {
  const draw = () => {
    const agent = page.fleet.agents.get(route.id);
    if (!agent) {
      return empty(page.isLoaded ? `No agent named ${route.id}. ` : "Loading … ", h("a", { href: "#/" }, "All agents"));
    }
    const drains = page.may() && /ready|quarantined/.test(stateOf(agent, now()));
    return [
      h("div.tools", h("h1", agent.agent),
        drains && button("Drain", () => page.steer.drain(agent.agent), { "data-action": "drain", class: "end" })),
      h("div.alone", card(agent), h("section", { "aria-label": "Details" }, details(agent), agent.telemetry?.gpus.map(sensors))),
    ];
  };
  return { title: () => route.id, draw, ticks: true };
}
