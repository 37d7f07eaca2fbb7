// Decides where checkpoints stand in a picture of what was trained from what. It is pure.

export const BASE = "";

/**
 * Nodes in the order they were made, with a column and a lane each, and edges from parents. Lane 0
 * holds the way from the base to the newest checkpoint that ended a training; those that ended one
 * and were left lie above it (−1), those on the way of a training below (+1).
 */
export function ancestry(board) {
  const points = [...board.cycles.values()].flatMap(({ cycle, checkpoints, done, evals }) =>
    checkpoints.map((it) => ({ ...it, cycle, rolledBack: it.final && done?.then === "ROLL_BACK",
      evals: evals.filter((one) => one.step === it.step) })));
  const base = { cycle: 0, step: 0, manifest: BASE, final: true, isBase: true,
    evals: (board.cycles.get(0)?.evals ?? []).filter((it) => it.step === 0) };
  const nodes = [base, ...points];
  const byManifest = new Map(nodes.map((node) => [node.manifest, node]));
  const parentOf = (node) => (node.isBase ? null : byManifest.get(node.parent) ?? base);
  const trunk = trunkOf(points, parentOf);
  nodes.forEach((node, column) => {
    node.column = column;
    node.lane = node.isBase || trunk.has(node) ? 0 : node.final ? -1 : 1;
  });
  const best = bestOf(board);
  for (const node of nodes) node.best = node.final && node.cycle === best;
  return { nodes, edges: points.map((node) => ({ from: parentOf(node), to: node, trunk: trunk.has(node) })) };
}

function trunkOf(points, parentOf) {
  const trunk = new Set();
  const newest = points.findLast((it) => it.final) ?? points.at(-1);
  // A set also ends what no log should hold: a circle.
  for (let node = newest; node && !trunk.has(node); node = parentOf(node)) trunk.add(node);
  return trunk;
}

/** The best cycle as the last that is done says, 0 for the base; null: nobody said. */
export const bestOf = (board) =>
  [...board.cycles.values()].findLast(({ done }) => done)?.done.best ?? null;
