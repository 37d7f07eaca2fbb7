// Flattens a run's spec into one line per setting, with the names that spec files use. Pure functions.

import { bytes } from "./format.js";

const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const short = (digest) => digest.replace(/^(b3:[0-9a-f]{12})[0-9a-f]+$/, "$1…");

export const settingsOf = (spec) => flatten("", spec).filter(([key]) => key !== "run" && key !== "submitted_at");

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
