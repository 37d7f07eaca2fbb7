// Draws the graph of checkpoints that ancestry.js lays out, and the details of the selected one.

import { ancestry } from "./ancestry.js";
import { h } from "./dom.js";
import { compact, count, decimal, passRate } from "./format.js";
import { chip, command, empty, facts, note, table } from "./parts.js";
import { isOver } from "./store.js";

const COLUMN = 54, LANE = 40, LEFT = 28, TOP = 34, BOTTOM = 34;

const nameOf = (node) => (node.isBase ? "base" : `${node.cycle}/${node.step}`);

const labelOf = (node, cycles) => (node.isBase ? "base" : cycles ? `cycle ${node.cycle}` : count(node.step));

export function lineage(redraw) {
  let chosenManifest = null;
  let scroller = null, position = null;
  // In the next frame, when the node has its place in the document.
  const reveal = () => requestAnimationFrame(() => {
    const { scrollLeft, clientWidth } = scroller ?? {};
    if (position < scrollLeft + COLUMN || position > scrollLeft + clientWidth - COLUMN) scroller.scrollLeft = position - clientWidth / 2;
  });

  return function draw(board) {
    const { nodes, edges } = ancestry(board);
    if (nodes.length === 1) {
      return empty(isOver(board.head.state) ? "No checkpoints: nothing was trained." : "No checkpoints yet. The first training creates one.");
    }
    const x = (node) => LEFT + node.column * COLUMN;
    const lanes = nodes.map(({ lane }) => lane);
    const [top, bottom] = [Math.min(...lanes), Math.max(...lanes)];
    const y = (node) => TOP + (node.lane - top) * LANE;
    const selected = nodes.find(({ manifest }) => manifest === chosenManifest) ?? nodes.find(({ best }) => best) ?? nodes.at(-1);
    if (position !== x(selected)) {
      position = x(selected);
      reveal();
    }
    const choose = (node) => () => {
      chosenManifest = node.manifest;
      redraw();
    };
    const onkeydown = (event) => {
      const to = nodes[selected.column + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? NaN)];
      if (!to) return;
      event.preventDefault();
      choose(to)();
    };
    const edge = ({ from, to, trunk }) => h("path.edge", { class: trunk && "trunk", d: from.lane === to.lane
      ? `M${x(from)} ${y(from)}H${x(to)}`
      : `M${x(from)} ${y(from)}C${x(from) + COLUMN} ${y(from)} ${x(to) - COLUMN} ${y(to)} ${x(to)} ${y(to)}` });
    const dot = (node) => h("g.node", {
      class: ["final", "best", "rolledBack"].filter((it) => node[it]).concat(node === selected ? "chosen" : []).join(" "),
      "data-checkpoint": nameOf(node), transform: `translate(${x(node)} ${y(node)})`, onclick: choose(node),
    },
    h("circle", { r: node.final ? 9 : 5 }), h("title", nameOf(node)),
    h("text.sign", { y: 4 }, node.best ? "★" : node.rolledBack && "↩"),
    // Of a run without cycles, the steps are the only names.
    (node.final || !board.head.cycles) && h("text", { y: node.lane < 0 ? -15 : 24 }, labelOf(node, board.head.cycles)));
    return h("div.panel",
      h("div.scrolled", { ref(node) {
        scroller = node;
        reveal();
      } }, h("svg", {
        width: LEFT * 2 + (nodes.length - 1) * COLUMN, height: TOP + (bottom - top) * LANE + BOTTOM, tabindex: 0, onkeydown, role: "application",
        "aria-label": `${count(nodes.length - 1)} checkpoints and their base. Use the arrow keys to select one. Selected: ${nameOf(selected)}`,
      }, edges.map(edge), nodes.map(dot))),
      details(board, selected));
  };
}

function details(board, node) {
  const ref = `${board.head.run}/${node.cycle}/${node.step}`;
  const heldout = node.final && board.cycles.get(node.cycle)?.done?.heldout;
  const title = node.isBase ? "Base model, before any training"
    : `${board.head.cycles ? `Cycle ${node.cycle}, step` : "Step"} ${count(node.step)} of ${count(node.steps)}`;
  return h("div.details", { "aria-live": "polite" },
    h("h3", title, " ", node.best && chip(board.head.endedS === null ? "★ best so far" : "★ best", "good"), " ",
      node.rolledBack && chip("↩ rolled back", "warn"), " ", !node.final && chip("intermediate")),
    facts([["held-out pass rate", heldout && passRate(heldout)]]),
    !node.isBase && facts([["loss", `${decimal(node.loss)} nats`], ["last learning rate", decimal(node.learningRate)],
      ["gradient norm", decimal(node.gradNorm)],
      ["weight change", node.weightChange !== null && decimal(node.weightChange)], ["tokens", compact(node.tokens)],
      ["trained by", `${node.agent}, ${node.engine}`], ["store path", h("code", node.path)]]),
    node.evals.length > 0 ? table(`Evaluations of ${nameOf(node)}`, ["suite", "perplexity", "bits per byte", "agent"], node.evals.map((it) =>
      [it.suite, `${decimal(it.perplexity)} ± ${decimal(it.stderr, 2)}`, decimal(it.bitsPerByte),
        it.agent + (it.stormed ? ", during a TLB storm" : "")]))
      : !heldout && note("Not evaluated yet."),
    (!node.isBase || node.isStored)
      && h("p", command(`flotilla checkpoint get ${ref}`), " ", command(`flotilla checkpoint export ${ref} --out exported`)));
}
