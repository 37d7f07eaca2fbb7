// Decides which curves a board holds: what was learned, by cycle or by step. It is pure, and does
// not know how curves are drawn.

import { count, figure, percent, place } from "./format.js";

const Z95 = 1.96;

/** Runs without cycles are told by their steps. */
export const axisOf = ({ head }) => (head.cycles ? "cycle" : "step");

/** Where a board's curves may be asked about. */
export const stopsOf = (board) => (axisOf(board) === "cycle" ? Array.from({ length: board.head.cycles + 1 }, (_, at) => at)
  : [...board.cycles.values()].flatMap((it) => it.checkpoints.map(({ step }) => step)));

/** Where a checkpoint stands: at its cycle's end, or at the share of it that was trained by then. */
function placeOf(board, { cycle, checkpoints }, step) {
  if (axisOf(board) === "step") return step;
  const steps = checkpoints.find((it) => it.step === step)?.steps;
  return cycle && steps ? cycle - 1 + step / steps : cycle;
}

/** One line a name: `read` gives [name, point] pairs of a cycle. */
function linesOf(board, read) {
  const lines = new Map();
  for (const [name, point] of [...board.cycles.values()].flatMap(read)) {
    if (Number.isFinite(point.y)) lines.set(name, [...(lines.get(name) ?? []), point]);
  }
  return [...lines].map(([name, points]) => ({ name, points: points.sort((a, b) => a.x - b.x) }));
}

const about = (y, error, most = Infinity) => ({ y, low: Math.max(0, y - Z95 * error), high: Math.min(most, y + Z95 * error) });

function passRates({ cycle, done }) {
  const all = done ? [["held-out", done.heldout], ["train", done.train], ...done.suites.map((it) => [it.suite, it.rate])] : [];
  return all.filter(([, rate]) => rate?.samples).map(([name, { mean, stderr }]) => [name, { x: cycle, ...about(mean, stderr, 1) }]);
}

function passAts({ cycle, done }) {
  const of = (prefix, list) => list.map(({ k, mean, low, high }) => [`${prefix}pass@${k}`, { x: cycle, y: mean, low, high }]);
  return done ? [...of("", done.passAt), ...done.suites.flatMap((it) => of(`${it.suite} `, it.passAt))] : [];
}

/** Bits per byte follow from the perplexity's logarithm, and so does their error. */
const bits = ({ bitsPerByte: y, perplexity, stderr }) => about(y, perplexity > 1 ? (y * stderr) / perplexity / Math.log(perplexity) : 0);

/** All charts that have something to show, in the order they are looked at. */
export function charts(board) {
  const evals = (value) => linesOf(board, (cycle) => cycle.evals.map((it) =>
    [it.suite, { x: placeOf(board, cycle, it.step), ...value(it), odd: it.stormed }]));
  // What a run begins with was trained by nobody.
  const training = (field) => linesOf(board, (cycle) => cycle.checkpoints.filter((it) => it.step && it[field] !== null)
    .map((it) => ["training", { x: placeOf(board, cycle, it.step), y: it[field] }]));
  const selected = (field) => linesOf(board, ({ cycle, selected: it }) =>
    (it && it[field] !== null ? [[field, { x: cycle, y: it[field] }]] : []));
  const share = { write: (it) => percent(it), tick: (it) => percent(it, 0), max: 1 };
  const all = [
    { id: "pass-rate", title: "Pass rate", about: "mean ± 1.96 standard errors over prompts", ...share, zero: true, band: true,
      lines: linesOf(board, passRates) },
    { id: "pass-at", title: "Pass@k, held-out", about: "Wilson’s 95 % interval over prompts", ...share, lines: linesOf(board, passAts) },
    { id: "perplexity", title: "Perplexity", about: "± 1.96 standard errors; hollow: TLB storm during the evaluation",
      lines: evals((it) => about(it.perplexity, it.stderr)) },
    { id: "bits-per-byte", title: "Bits per byte", about: "± 1.96 standard errors, derived from perplexity", lines: evals(bits) },
    { id: "loss", title: "Training loss", unit: "nats", about: "mean since the previous checkpoint", lines: training("loss") },
    { id: "learning-rate", title: "Learning rate", zero: true, lines: training("learningRate") },
    { id: "gradient-norm", title: "Gradient norm", about: "before clipping", zero: true, lines: training("gradNorm") },
    { id: "weight-change", title: "Weight change", about: "L2 distance from the start of the cycle", zero: true, lines: training("weightChange") },
    { id: "entropy", title: "Entropy of samples", unit: "nats per token", zero: true, lines: selected("entropy") },
    { id: "diversity", title: "Diversity of samples", about: "distinct completions per judged sample", ...share, zero: true,
      lines: selected("diversity") },
  ];
  return all.filter(({ lines }) => lines.length).map((chart) => ({ write: figure, tick: (it) => figure(it, 3), ...chart }));
}

/** What became of each cycle's samples, the kept ones lowest: shares of a column a cycle. */
export function fates(board) {
  const selected = [...board.cycles.values()].filter((it) => it.selected?.considered);
  const names = ["kept", ...new Set(selected.flatMap((it) => Object.keys(it.selected.dropped)))];
  const all = selected.map(({ cycle, selected: { kept, dropped, considered } }) => {
    let to = 0;
    const parts = Object.entries({ kept, ...dropped }).map(([name, value]) =>
      ({ name, value, hue: names.indexOf(name), wide: 1, from: to, to: (to += value / considered) }));
    const legend = parts.map(({ name, value, hue }) => [name, `${count(value)} (${percent(value / considered)})`, hue]);
    return { cycle, parts, legend, mark: null };
  });
  return { id: "selection", title: "Kept samples and drop reasons", part: "fate", write: (it) => percent(it, 0), all };
}

/** How rewards were spread: a histogram on its side a cycle. */
export function rewards(board) {
  const rewarded = [...board.cycles.values()].filter((it) => it.rewards?.counts.length);
  const all = rewarded.map(({ cycle, selected, rewards: { low, width, counts } }) => {
    const most = Math.max(1, ...counts);
    const edge = (at) => low + at * width;
    const parts = counts.map((value, at) =>
      ({ name: `from ${place(edge(at))}`, value, hue: 0, wide: Math.sqrt(value / most), from: edge(at), to: edge(at + 1) }))
      .filter(({ value }) => value);
    const mark = selected?.minReward || null;
    const judged = [`cycle ${cycle}`, `${count(counts.reduce((sum, n) => sum + n, 0))} judged`, 0];
    return { cycle, parts, mark, legend: [judged, ...(mark ? [["dashed: lowest reward kept", place(mark), 0]] : [])] };
  });
  return { id: "rewards", title: "Rewards", about: "width: square root of the number of samples", part: "reward", write: String, all };
}

/** The same curves of several boards, in one chart each: a run has a colour, a line its dashes. */
export function overlaid(boards) {
  const merged = new Map();
  boards.forEach((board, hue) => {
    for (const chart of charts(board)) {
      const into = merged.get(chart.id) ?? { ...chart, band: false, lines: [] };
      const nameOf = ({ name }) => (chart.lines.length > 1 ? `${board.head.run} ${name}` : board.head.run);
      into.lines.push(...chart.lines.map((line) => ({ ...line, hue, name: nameOf(line) })));
      merged.set(chart.id, into);
    }
  });
  return [...merged.values()];
}
