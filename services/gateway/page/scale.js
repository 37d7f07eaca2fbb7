// Scales and ticks of axes. Pure functions.

/** Maps `domain` linearly to `range`; an empty domain to its middle. */
export function linear([from, to], [start, end]) {
  const span = to - from;
  return (value) => (span ? start + ((value - from) / span) * (end - start) : (start + end) / 2);
}

/** About `wanted` round values within the domain. */
export function ticks([from, to], wanted = 4) {
  const span = to - from;
  if (!(span > 0) || !Number.isFinite(span)) return [from];
  const rough = span / wanted;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * ([1, 2, 5].find((it) => it * size >= rough) ?? 10);
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.floor(to / step + 1e-9);
  // Multiplies instead of adding, and rounds, so that 0.3 is exactly 0.3.
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) =>
    Number(((first + at) * step).toPrecision(12)));
}

/** At most `wanted` ticks at round numbers of seconds, minutes or hours, plus one. */
export function timeTicks([from, to], wanted) {
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];
  const step = steps.find((it) => (to - from) / it <= wanted) ?? 86400 * Math.ceil((to - from) / wanted / 86400);
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.max(0, Math.floor(to / step) - first + 1) }, (_, at) => (first + at) * step);
}

/** The extent of values with a margin of 8 %; never empty. */
export function extent(values, { zero = false, max = Infinity } = {}) {
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return [0, 1];
  let [low, high] = finite.reduce(([a, b], it) => [Math.min(a, it), Math.max(b, it)], [Infinity, -Infinity]);
  if (zero) low = Math.min(0, low);
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 ? Math.max(0, low - room) : low - room, Math.max(low, Math.min(max, high + room))];
}

export const nearest = (values, wanted) =>
  values.reduce((best, it) => (Math.abs(it - wanted) < Math.abs(best - wanted) ? it : best), values[0]);
