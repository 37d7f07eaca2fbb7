// Extracts the charts of a board, by cycle or by step. Pure functions; chart.js draws them.

import { count, decimal, percent, place } from "./format.js";

const Z95 = 1.96;

/** Runs without cycles have charts by step. */
export const axisOf = ({ head }) => (head.cycles ? "cycle" : "step");

/** The positions of the cursor. */
export const stopsOf = (board) => (axisOf(board) === "cycle" ? Array.from({ length: board.head.cycles + 1 }, (_, at) => at)
  : [...board.cycles.values()].flatMap((it) => it.checkpoints.map(({ step }) => step)));

/** The position of a checkpoint: fractional within its cycle, the cycle's number at its end. */
function placeOf(board, { cycle, checkpoints }, step) {
  if (axisOf(board) === "step") return step;
  const steps = checkpoints.find((it) => it.step === step)?.steps;
  return cycle && steps ? cycle - 1 + step / steps : cycle;
}

/** Groups points into lines by name; `read` returns the [name, point] pairs of a cycle. */
function linesOf(board, read) {
  const lines = new Map();
  for (const [name, point] of [...board.cycles.values()].flatMap(read)) {
    if (Number.isFinite(point.y)) lines.set(name, [...(lines.get(name) ?? []), point]);
  }
  return [...lines].map(([name, points]) => ({ name, points: points.sort((a, b) => a.x - b.x) }));
}

const interval95 = (y, error, most = Infinity) => ({ y, low: Math.max(0, y - Z95 * error), high: Math.min(most, y + Z95 * error) });

function passRates({ cycle, done }) {
  const all = done ? [["held-out", done.heldout], ["train", done.train], ...done.suites.map((it) => [it.suite, it.rate])] : [];
  return all.filter(([, rate]) => rate?.samples).map(([name, { mean, stderr }]) => [name, { x: cycle, ...interval95(mean, stderr, 1) }]);
}

function passAts({ cycle, done }) {
  const pointsOf = (prefix, list) => list.map(({ k, mean, low, high }) => [`${prefix}pass@${k}`, { x: cycle, y: mean, low, high }]);
  return done ? [...pointsOf("", done.passAt), ...done.suites.flatMap((it) => pointsOf(`${it.suite} `, it.passAt))] : [];
}

/** Bits per byte are proportional to the perplexity's logarithm; the error follows from that. */
const bits = ({ bitsPerByte: y, perplexity, stderr }) => interval95(y, perplexity > 1 ? (y * stderr) / perplexity / Math.log(perplexity) : 0);

/** All charts with data, in display order. */
export function charts(board) {
  const evals = (value) => linesOf(board, (cycle) => cycle.evals.map((it) =>
    [it.suite, { x: placeOf(board, cycle, it.step), ...value(it), odd: it.stormed }]));
  // The checkpoint of step 0 was not trained.
  const training = (field) => linesOf(board, (cycle) => cycle.checkpoints.filter((it) => it.step && it[field] !== null)
    .map((it) => ["training", { x: placeOf(board, cycle, it.step), y: it[field] }]));
  const weighting = (value, has, name = "training") => linesOf(board, (cycle) => cycle.checkpoints
    .filter((it) => it.step && it.weighting && has(it.weighting))
    .map((it) => [name, { x: placeOf(board, cycle, it.step), y: value(it.weighting) }]));
  const selected = (field) => linesOf(board, ({ cycle, selected: it }) =>
    (it && it[field] !== null ? [[field, { x: cycle, y: it[field] }]] : []));
  const share = { write: (it) => percent(it), tick: (it) => percent(it, 0), max: 1 };
  const all = [
    { id: "pass-rate", title: "Pass rate", subtitle: "mean ± 1.96 standard errors over prompts", ...share, zero: true, band: true,
      lines: linesOf(board, passRates) },
    { id: "pass-at", title: "Pass@k, held-out", subtitle: "Wilson’s 95 % interval over prompts", ...share, lines: linesOf(board, passAts) },
    { id: "perplexity", title: "Perplexity", subtitle: "± 1.96 standard errors; hollow: TLB storm during the evaluation",
      lines: evals((it) => interval95(it.perplexity, it.stderr)) },
    { id: "bits-per-byte", title: "Bits per byte", subtitle: "± 1.96 standard errors, derived from perplexity", lines: evals(bits) },
    { id: "loss", title: "Training loss", unit: "nats", subtitle: "mean since the previous checkpoint", lines: training("loss") },
    { id: "learning-rate", title: "Learning rate", subtitle: "at the last step of each checkpoint", zero: true, lines: training("learningRate") },
    { id: "gradient-norm", title: "Gradient norm", subtitle: "before clipping", zero: true, lines: training("gradNorm") },
    { id: "weight-change", title: "Weight change", subtitle: "L2 distance from the start of the cycle", zero: true, lines: training("weightChange") },
    { id: "dropped-tokens", title: "Dropped tokens", subtitle: "out of the bounds of the objective’s ratio", ...share, zero: true,
      lines: weighting((it) => it.dropped / it.tokens, (it) => it.tokens > 0) },
    { id: "divergence", title: "Divergence", unit: "nats per token", subtitle: "KL divergence of the trained weights, estimated (k3)", zero: true,
      lines: [...weighting((it) => it.drift, (it) => it.drift !== null, "from those that drew"),
        ...weighting((it) => it.divergence, (it) => it.divergence !== null, "from the reference")] },
    { id: "entropy", title: "Entropy of samples", unit: "nats per token", zero: true, lines: selected("entropy") },
    { id: "diversity", title: "Diversity of samples", subtitle: "distinct completions per sample", ...share, zero: true,
      lines: selected("diversity") },
  ];
  return all.filter(({ lines }) => lines.length).map((chart) => ({ write: decimal, tick: (it) => decimal(it, 3), ...chart }));
}

/** Drop reasons in the order of docs/RAFT.md, each with its colour; rare ones share colours. */
const FATES = new Map([["kept", 3], ["unjudged", 7], ["error", 5], ["void", 7], ["set aside", 7], ["all right", 0], ["all wrong", 6], ["empty", 7],
  ["unfinished", 5], ["short", 7], ["long", 7], ["failed", 4], ["duplicate", 1], ["near duplicate", 6], ["outranked", 2], ["below the share", 0],
  ["no advantage", 0], ["unpaired", 2], ["no log-probabilities", 7], ["not scored", 5]]);
const fateOrder = [...FATES.keys()];

/** The shares of kept and dropped samples, by drop reason, one column per cycle. */
export function fates(board) {
  const selected = [...board.cycles.values()].filter((it) => it.selected?.considered);
  const all = selected.map(({ cycle, selected: { kept, dropped, considered } }) => {
    let to = 0;
    const place = ([name]) => (FATES.has(name) ? fateOrder.indexOf(name) : fateOrder.length);
    const ordered = Object.entries({ kept, ...dropped }).sort((a, b) => place(a) - place(b) || a[0].localeCompare(b[0]));
    const parts = ordered.map(([name, value]) =>
      ({ name, value, hue: FATES.get(name) ?? 7, wide: 1, from: to, to: (to += value / considered) }));
    const legend = parts.map(({ name, value, hue }) => [name, `${count(value)} (${percent(value / considered)})`, hue]);
    return { cycle, parts, legend, mark: null };
  });
  return { id: "selection", title: "Kept samples and drop reasons", part: "kept or drop reason", write: (it) => percent(it, 0), all };
}

/** The histogram of rewards, one per cycle, drawn sideways. */
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
    return { cycle, parts, mark, legend: [judged, ...(mark ? [["lowest reward kept", place(mark), 0, "line"]] : [])] };
  });
  return { id: "rewards", title: "Rewards", subtitle: "wider bars have more samples (by their square root)", part: "reward", write: String, all };
}

const RATIO_CLASSES = ["below 0.5", "0.5 to 0.8", "0.8 to 0.95", "0.95 to 1.05", "1.05 to 1.25", "1.25 to 2", "2 and more"];
const RATIO_HUES = [4, 5, 1, 3, 2, 0, 6];

/** The shares of tokens by how much likelier training made them, at the last checkpoint of each cycle. */
export function ratios(board) {
  const last = [...board.cycles.values()].map(({ cycle, checkpoints }) => [cycle, checkpoints.findLast((it) => it.weighting?.ratios.length)]);
  const all = last.filter(([, found]) => found).map(([cycle, { weighting: { ratios: counts } }]) => {
    const sum = Math.max(1, counts.reduce((all, n) => all + n, 0));
    let to = 0;
    const parts = counts.map((value, at) => ({ name: RATIO_CLASSES[at], value, hue: RATIO_HUES[at], wide: 1, from: to, to: (to += value / sum) }))
      .filter(({ value }) => value);
    const legend = parts.map(({ name, value, hue }) => [name, `${count(value)} (${percent(value / sum)})`, hue]);
    return { cycle, parts, legend, mark: null };
  });
  return { id: "ratios", title: "Ratios of tokens", subtitle: "probability in training, relative to that when drawn", part: "ratio",
    write: (it) => percent(it, 0), all };
}

/** Merges the charts of several boards: each run has the colour of its place in `all`, each line a dash pattern. */
export function mergedCharts(boards, all) {
  const merged = new Map();
  boards.forEach((board) => {
    const hue = all.indexOf(board);
    for (const chart of charts(board)) {
      const into = merged.get(chart.id) ?? { ...chart, band: false, lines: [] };
      const nameOf = ({ name }) => (chart.lines.length > 1 ? `${board.head.run} ${name}` : board.head.run);
      into.lines.push(...chart.lines.map((line) => ({ ...line, hue, name: nameOf(line) })));
      merged.set(chart.id, into);
    }
  });
  return [...merged.values()];
}
