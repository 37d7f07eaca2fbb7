// Flattens a run's spec into one line per setting, with the names that spec files use. Pure functions.

import { bytes } from "./format.js";

const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const short = (digest) => digest.replace(/^(b3:[0-9a-f]{12})[0-9a-f]+$/, "$1…");

// Beginnings of paths in the fact, with those in a spec file. The first that fits counts.
const SPEC_NAMES = [
  ["suites", "evals"],
  ["promotion", "promote"],
  ["queue.from_minute", "queue.from"],
  ["queue.until_minute", "queue.until"],
  ["base.tree.path", "base"],
  ["base.adapter.path", "base.adapter"],
  ["sft.dataset.digest", "sft.data"],
  ["sft.dataset", "sft.data"],
  ["sft.training.lora", "sft.lora"],
  ["raft.prompts.digest", "raft.prompts"],
  ["raft.heldout.digest", "raft.heldout"],
  ["raft.teacher.path", "raft.teacher"],
  ["raft.prompt_suites", "evals"],
  ["raft.training.lora", "raft.lora"],
  ["raft.training.objective.name", "raft.objective"],
  ["raft.training.objective.settings", "raft.objective"],
  ["raft.training.objective", "raft.objective"],
  ["raft.schedules.temperature", "raft.sampling.temperature"],
  ["raft.schedules.learning_rate", "raft.training.learning_rate"],
  ["raft.schedules.min_reward", "raft.selection.min_reward"],
  ["raft.schedules.keep_share", "raft.selection.keep_share"],
  ["raft.gates.pass_rates", "raft.gates.pass_rate"],
];

// Other values are no settings: results of a forked run, and what every run has of its own.
const isSetting = ([key]) => key !== "run" && key !== "submitted_at" && !/^fork\.(cycles|prompts|judged|passed)\b/.test(key);

function specPath(key) {
  const found = SPEC_NAMES.find(([fact]) => key === fact || key.startsWith(`${fact}.`));
  return found ? found[1] + key.slice(found[0].length) : key;
}

/** Schedules come last, and count in place of the one value for all cycles. */
export function settingsOf(spec) {
  const flat = flatten("", spec).filter(isSetting);
  const schedules = flat.filter(([key, value]) => key.startsWith("raft.schedules.") && value);
  const others = flat.filter(([key]) => !key.startsWith("raft.schedules"));
  return [...new Map([...others, ...schedules].map(([key, value]) => [specPath(key), value]))];
}

function flatten(key, value) {
  const within = (name) => (key ? `${key}.${name}` : name);
  if (value === null || typeof value !== "object") return [[key, String(value)]];
  if (Array.isArray(value) && value.every((it) => typeof it !== "object")) return [[key, value.join(", ")]];
  if (Array.isArray(value)) return value.flatMap((it, at) => flatten(within(it.name ?? at + 1), it));
  if (value.digest) return [[key, `${short(value.digest)}, ${bytes(Number(value.bytes ?? 0))}`]];
  if (value.manifest) return [[key, value.path ?? short(value.manifest)]];
  const fields = Object.entries(value);
  return fields.length ? fields.flatMap(([name, it]) => flatten(within(snake(name)), it)) : [[key, "default"]];
}

/** [key, value …] of each setting that differs; one value per spec. */
export function differences(specs) {
  const all = specs.map((spec) => new Map(settingsOf(spec)));
  const keys = [...new Set(all.flatMap((settings) => [...settings.keys()]))];
  return keys.map((key) => [key, ...all.map((settings) => settings.get(key) ?? "–")])
    .filter(([, first, ...others]) => others.some((it) => it !== first));
}
