// Parses the gateway's messages and merges updates into the known state. Pure functions.

/** Agents send a heartbeat every few seconds. */
const GONE_AFTER_MS = 45_000;

const PARSERS = { "#": (it) => Number(it ?? 0), "?": (it) => (it === undefined ? null : Number(it)), "!": Boolean };
const text = (it) => it ?? "";

/**
 * Returns a parser of a message in Protobuf's JSON, where zero fields are absent and 64-bit numbers
 * are strings. `name#` is a number, `name?` a number or null, `name!` a flag, all others strings.
 * `parts` maps names to the parsers of nested messages, in brackets if the field is repeated.
 */
function message(fields, parts = {}) {
  const plain = fields.split(" ").filter(Boolean).map((it) => [it.replace(/\W$/, ""), PARSERS[it.at(-1)] ?? text]);
  return (raw) => {
    const read = Object.fromEntries(plain.map(([name, parse]) => [name, parse(raw?.[name])]));
    for (const [name, part] of Object.entries(parts)) {
      const it = raw?.[name];
      read[name] = Array.isArray(part) ? (it ?? []).map(part[0]) : it ? part(it) : null;
    }
    return read;
  };
}

const number = (it) => Number(it);
const counts = (raw) => Object.fromEntries(Object.entries(raw).map(([name, n]) => [name, Number(n)]));
const pressure = message("someAvg10#");
const gpu = message("gfx integrated! asleep! ordinal# busyPercent? vramTotal# vramUsed# gttTotal# gttUsed# watts?", {
  temperatures: [message("sensor celsius# critical?")], clocks: [message("sensor hertz#")],
});
const telemetry = message("resting cpuBusy? memoryTotal# memoryAvailable# swapTotal# swapFree# tlbShootdownsPerS? watts? joules#", {
  gpus: [gpu], warnings: [text], storm: message("level cause reaction storms#"),
  cpuPressure: pressure, ioPressure: pressure, memoryPressure: pressure,
});
const agent = message("agent host version pool state startedAt seenAt trouble profile "
  + "cpus# rssBytes# tokensPerS# jobsDone# trainingBytes# sampleS#", {
  roles: [text], engines: [text], abilities: [text], telemetry, withheld: [message("role finding seen remedy")],
  jobs: [message("role run job note cycle# done# total# waits!")],
  exchange: message("bytesFromStore# bytesFromPeers# bytesToPeers#"),
});
const rate = message("mean# stderr# prompts# samples#");
const runLine = message("run name kind state message submittedAt endedAt trialOf forkedFrom cyclesDone# cycles# bestCycle#", { heldout: rate, bestHeldout: rate });

const passAt = [message("k# mean# low# high#")];
const eta = message("earlyS# likelyS# lateS#");
const head = message("run name kind state message submittedAt endedS? cycle# cycles# phase done# total# unit troublesInAll# atS#", {
  phaseEnds: eta, runEnds: eta, steered: [message("action reason by atS#")], troubles: [message("what agent message atS# final!")],
});
const cycleOf = message("cycle#", {
  rewards: message("low# width#", { counts: [number] }),
  selected: message("considered# kept# minReward# diversity# entropy?", { dropped: counts }),
  done: message("then kept# best#", {
    heldout: rate, train: rate, passAt, findings: [message("gate then value# best# limit#")],
    suites: [message("suite", { rate, passAt })],
  }),
  spans: [message("agent work beginS# endS# count# firstOuterStep# lastOuterStep#")],
  checkpoints: [message("agent engine manifest parent path step# steps# atS# loss# learningRate# gradNorm# weightChange? tokens# final!", {
    weighting: message("tokens# dropped# ratio? drift? divergence?", { ratios: [number] }),
  })],
  evals: [message("suite agent step# perplexity# stderr# bitsPerByte# stormed!")],
});
export const samplesPage = message("promptsInAll#", {
  outcomes: counts, fates: counts, suites: [text],
  prompts: [message("promptId text samplesInAll#", {
    samples: [message("index# text cut! tokens# finish logprob? outcome reward# detail fate agent", {
      turns: [message("text observation")],
    })],
  })],
});

const tree = message("path");
export const channelOf = message("channel at number#", {
  agents: [text],
  move: message("run reason user cycle# rollBack!", {
    base: tree, serving: message("pool replicas#"), keeping: message("days#"), learning: message("atLeast#"),
    evidence: message("run cycle# p# difference# live!"),
  }),
});

/** Merges `update` into the board; the first update of a connection replaces the cycles. */
export function mergeBoard(board, update, first) {
  const known = first || !board ? [] : board.cycles;
  const changed = (update.cycles ?? []).map(cycleOf).map((it) => [it.cycle, it]);
  const cycles = new Map([...new Map([...known, ...changed])].sort(([a], [b]) => a - b));
  return { head: head(update.head), cycles, spec: update.spec ?? board?.spec ?? {} };
}

export const emptyFleet = () => ({ agents: new Map(), runs: new Map() });

export function mergeFleet(fleet, change, first) {
  const before = first ? emptyFleet() : fleet;
  const agents = (change.agents ?? []).map(agent).map((it) => [it.agent, it]);
  const runs = (change.runs ?? []).map(runLine).map((it) => [it.run, it]);
  return { agents: mergeSorted(before.agents, agents), runs: new Map([...before.runs, ...runs]) };
}

/** Natural order: box-9 before box-10. */
const names = new Intl.Collator("en", { numeric: true });
function mergeSorted(known, changed) {
  const merged = new Map([...known, ...changed]);
  return merged.size === known.size ? merged : new Map([...merged].sort(([a], [b]) => names.compare(a, b)));
}

export const newestFirst = (runs) => [...runs.values()].sort((a, b) => b.submittedAt.localeCompare(a.submittedAt));
export const isOver = (state) => !["running", "paused", "queued"].includes(state);

/** Says whose samples or cycles a run goes on from; empty for most runs. */
export const originOf = ({ trialOf, forkedFrom }) =>
  (trialOf ? `trial of an objective on ${trialOf}` : forkedFrom && `continues ${forkedFrom}`);

/** 0 to 1, or null for runs without cycles. The base of a RAFT run counts as a cycle. */
export const progressOf = ({ state, kind, cycles, cyclesDone }) =>
  cycles ? (state === "succeeded" ? 1 : Math.min(1, cyclesDone / (cycles + (kind === "raft")))) : null;

export const secondsSinceSeen = ({ seenAt }, now) => Math.max(0, now - Date.parse(seenAt || 0)) / 1000;

/** The last reported state (ready, draining, stopped, quarantined); gone after a long silence. */
export function stateOf(agent, now) {
  const reported = agent.state.toLowerCase() || "unknown";
  return reported !== "stopped" && secondsSinceSeen(agent, now) * 1000 > GONE_AFTER_MS ? "gone" : reported;
}

/** The reasons why an agent needs attention, the worst first. */
export function concerns(agent, now) {
  const state = stateOf(agent, now);
  return [
    (state === "gone" || state === "quarantined") && state,
    agent.trouble && "trouble",
    agent.withheld.length && "withheld",
    /WARN|STORM/.test(agent.telemetry?.storm?.level) && "storm",
    agent.telemetry?.warnings.length && "warning",
  ].filter(Boolean);
}

const isGenerating = (agent) => agent.jobs.some((job) => job.role === "generator" && !job.waits);

/** Totals of the fleet; rates and power only of agents that are online. */
export function fleetTotals(agents, now) {
  const all = [...agents.values()];
  const online = all.filter((it) => !/gone|stopped/.test(stateOf(it, now)));
  const concerned = all.map((it) => concerns(it, now)).filter((it) => it.length);
  const sum = (read) => online.reduce((total, it) => total + (read(it) ?? 0), 0);
  return {
    boxes: all.length, online: online.length, concerned: concerned.length, concerns: [...new Set(concerned.flat())].sort(),
    // An idle agent's figure is that of its last jobs.
    tokensPerS: sum((it) => (isGenerating(it) ? it.tokensPerS : 0)), watts: sum((it) => it.telemetry?.watts),
  };
}

/** The agents by host, in the order of their names: [host, agents] each. */
export function byHost(agents) {
  const hosts = new Map();
  for (const agent of agents) hosts.set(agent.host, [...(hosts.get(agent.host) ?? []), agent]);
  return [...hosts];
}
