// Formats numbers and times. Pure functions.

const NONE = "–";
const MINUTE = 60, HOUR = 3600, DAY = 86400;
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => grouped.format(value);
export const counted = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;
const minus = (text) => text.replace("e+", "e").replace(/-/g, "−");

/** A number with `digits` significant digits; very small and very large ones with an exponent. */
export function decimal(value, digits = 4) {
  if (value === null) return NONE;
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return minus(value.toExponential(Math.max(1, digits - 2)));
  if (size < 1) return minus(String(Number(value.toPrecision(digits))));
  return minus(value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))));
}

export const percent = (share, digits = 1) => `${(share * 100).toFixed(digits)} %`;
/** A pass rate with its standard error. */
export const passRate = ({ mean, stderr }) => `${percent(mean)} ± ${(stderr * 100).toFixed(1)}`;
export const withUnit = (value, unit) => (value === null ? null : `${count(value)} ${unit}`);
/** A value on a cycle axis, such as 3 or 2.25. */
export const place = (x) => String(Number(x.toFixed(2)));

export function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const at = Math.min(4, Math.floor(Math.log2(value || 1) / 10));
  const sized = value / 1024 ** at;
  return `${sized.toFixed(at && sized < 100 ? 1 : 0)} ${units[at]}`;
}

export function compact(value) {
  if (value < 10_000) return count(value);
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} k` : `${(value / 1e6).toFixed(2)} M`;
}

/** A duration in at most two units, such as 2 h 5 min. */
export function duration(seconds) {
  const s = Math.max(0, seconds);
  if (s < MINUTE) return `${s < 10 ? Number(s.toFixed(1)) : Math.round(s)} s`;
  const [big, bigName, small, smallName] =
    s < HOUR ? [MINUTE, "min", 1, "s"] : s < DAY ? [HOUR, "h", MINUTE, "min"] : [DAY, "d", HOUR, "h"];
  const smalls = Math.round(s / small);
  const rest = smalls % (big / small);
  return `${Math.floor((smalls * small) / big)} ${bigName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/** The local time of day, with the date unless it is today. */
export function clock(ms, now) {
  const at = new Date(ms);
  const time = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (at.toDateString() === new Date(now).toDateString()) return time;
  return `${at.toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" })} ${time}`;
}

/** `ends about 14:05 (13:50 – 14:40)`; empty without an estimate. */
export function ending(eta, submittedAt, now) {
  if (!eta) return "";
  const [early, likely, late] = [eta.earlyS, eta.likelyS, eta.lateS].map((s) => clock(Date.parse(submittedAt) + s * 1000, now));
  return `ends about ${likely}${early === late ? "" : ` (${early} – ${late})`}`;
}

/** The signs of states, for users who cannot see colours. */
export const SIGNS = {
  running: "▶", paused: "‖", queued: "◷", succeeded: "✓", failed: "✕", cancelled: "⊘",
  ready: "●", draining: "◐", stopped: "○", quarantined: "⚠", gone: "◌",
};
