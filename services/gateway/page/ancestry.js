// Lays out the graph of checkpoints and their parents. Pure functions.

export const BASE = "";

/**
 * Returns the nodes in creation order, each with a column and a lane, and the edges from parents.
 * Lane 0 is the path from the base to the newest final checkpoint. Abandoned final checkpoints are
 * above it (−1), intermediate ones below it (+1).
 */
export function ancestry(board) {
  const points = [...board.cycles.values()].flatMap(({ cycle, checkpoints, done, evals }) =>
    checkpoints.map((it) => ({ ...it, cycle, rolledBack: it.final && done?.then === "ROLL_BACK",
      evals: evals.filter((one) => one.step === it.step) })));
  // A RAFT run publishes its base as the checkpoint of cycle 0.
  const given = points.find(({ cycle, steps }) => cycle === 0 && !steps);
  const base = { manifest: BASE, evals: (board.cycles.get(0)?.evals ?? []).filter((it) => it.step === 0),
    ...given, cycle: 0, step: 0, final: true, isBase: true, isStored: Boolean(given) };
  const trained = points.filter((it) => it !== given);
  const nodes = [base, ...trained];
  const byManifest = new Map(nodes.map((node) => [node.manifest, node]));
  const parentOf = (node) => (node.isBase ? null : byManifest.get(node.parent) ?? base);
  const trunk = trunkOf(trained, parentOf);
  nodes.forEach((node, column) => {
    node.column = column;
    node.lane = node.isBase || trunk.has(node) ? 0 : node.final ? -1 : 1;
  });
  const best = bestNode(board, nodes);
  for (const node of nodes) node.best = node === best;
  return { nodes, edges: trained.map((node) => ({ from: parentOf(node), to: node, trunk: trunk.has(node) })) };
}

function trunkOf(points, parentOf) {
  const trunk = new Set();
  const newest = points.findLast((it) => it.final) ?? points.at(-1);
  // The set also ends a cycle of parents, which no valid log contains.
  for (let node = newest; node && !trunk.has(node); node = parentOf(node)) trunk.add(node);
  return trunk;
}

/**
 * The best node: of a RAFT run the last checkpoint of the best cycle, of others the one with the
 * lowest perplexity of the first suite. Undefined if nothing was measured.
 */
function bestNode(board, nodes) {
  if (board.head.cycles) {
    const best = bestOf(board);
    const isMeasured = (node) => node.evals.length > 0 || board.cycles.get(node.cycle)?.done?.heldout;
    return nodes.findLast((node) => node.final && node.cycle === best && isMeasured(node));
  }
  const suite = board.spec.suites?.[0]?.name;
  const perplexity = (node) => node.evals.find((it) => it.suite === suite)?.perplexity ?? Infinity;
  const best = nodes.reduce((a, b) => (perplexity(b) < perplexity(a) ? b : a));
  return perplexity(best) < Infinity ? best : undefined;
}

/** The best cycle according to the last finished one, 0 for the base; null if unknown. */
export const bestOf = (board) =>
  [...board.cycles.values()].findLast(({ done }) => done)?.done.best ?? null;
