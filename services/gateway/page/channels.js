// Shows the channels: as a list, and one with its moves as a view of its own.

import { now, poll } from "./api.js";
import { h } from "./dom.js";
import { clock, counted } from "./format.js";
import { button, command, empty, facts, note, section, table } from "./parts.js";
import { toBox, toChannel, toRun } from "./route.js";
import { channelOf } from "./store.js";

/** Reads the channels until `signal` aborts. Returns {channels}, updated in place. */
export function pollChannels({ page, signal }) {
  const polled = { channels: [] };
  poll("Channels/List", {}, {
    signal,
    onMessage({ channels = [] }) {
      polled.channels = channels.map(channelOf);
      page.redraw();
    },
    // Users who may not read channels see none.
    onFailure: () => {},
  });
  return polled;
}

/** The section of the fleet's view; nothing without channels. */
export const channelSection = (channels) => channels.length > 0 && section("channels", "Channels",
  table("Channels", ["channel", "model", "since", "served by", "requests"], channels.map((it) => [
    h("a", { href: toChannel(it.channel), "data-channel": it.channel }, it.channel),
    modelOf(it), timeOf(it), servedBy(it), requestsOf(it.move),
  ])));

const timeOf = ({ at }) => clock(Date.parse(at), now());

function modelOf({ move: { run, cycle, base } }) {
  if (run) return h("a", { href: toRun(run) }, `${run}/${cycle}`);
  return base ? h("code", base.path) : "none: forgotten";
}

function servedBy({ move: { serving }, agents }) {
  if (!serving) return "not served";
  return agents.length ? agents.map((name, at) => [at > 0 && ", ", h("a", { href: toBox(name) }, name)]) : "no agent yet";
}

/** What happens to requests: whether they are kept, and what their feedback causes. */
const requestsOf = ({ keeping, learning, rollBack }) => [
  keeping ? `kept for ${counted(keeping.days, "day")}` : "not kept",
  learning && `feedback on ${counted(learning.atLeast, "request")} starts a run`,
  rollBack && "lower ratings move it back",
].filter(Boolean).join("; ");

/** The comparison that a move follows, such as `+4.2 points over raft-1/0, p = 0.01`, and its reason. */
function reasonOf({ evidence: it, reason }) {
  const points = it && `${it.difference < 0 ? "−" : "+"}${Math.abs(it.difference * 100).toFixed(1)} points`;
  const evidence = it && `${points}${it.live ? " by ratings" : ""} over ${it.run}/${it.cycle}, p = ${it.p.toFixed(2)}`;
  return [evidence, reason].filter(Boolean).join("; ") || "–";
}

export function open({ page, route, signal }) {
  let moves = [];
  let failure = "";
  poll("Channels/History", { channel: route.id }, {
    signal,
    onMessage(answer) {
      moves = answer.moves.map(channelOf);
      page.redraw();
    },
    onFailure(error) {
      failure = error.message;
      page.redraw();
    },
  });

  const draw = () => {
    const last = moves.at(-1);
    if (!last) return empty(failure || `Loading ${route.id} …`, " ", h("a", { href: "#/" }, "All channels"));
    const { move } = last;
    const address = `${location.origin}/v1`;
    const question = JSON.stringify({ model: route.id, messages: [{ role: "user", content: "Hello" }] });
    return [
      h("header.panel", { "data-channel": route.id, "data-move": last.number },
        h("div.tools", h("h1", route.id), h("span.end", moves.length > 1 && page.may()
          && button("Roll back", () => page.steer.rollBack(route.id), { "data-action": "roll-back" }))),
        facts([["model", modelOf(last)], ["since", timeOf(last)], ["served by", servedBy(last)], ["pool", move.serving?.pool],
          ["agents at most", move.serving?.replicas], ["requests", requestsOf(move)]])),
      move.serving && section("use", "Use", note("Clients of OpenAI’s API use the address ", h("code", address), " and the model ", h("code", route.id),
        "; in a closed fleet, the text of a bearer is their key."),
        command(`curl ${address}/chat/completions -H 'content-type: application/json' -d '${question}'`)),
      section("moves", "Moves", table("Moves", ["move", "at", "model", "by", "reason"],
        moves.toReversed().map((it) => [it.number, timeOf(it), modelOf(it), it.move.user || "–", reasonOf(it.move)]))),
    ];
  };
  return { title: () => route.id, draw };
}
