// Shows the channels: as a list, and one with its moves as a view of its own.

import { now, poll } from "./api.js";
import { h } from "./dom.js";
import { clock, counted } from "./format.js";
import { button, callout, command, empty, facts, note, section, table } from "./parts.js";
import { toBox, toChannel, toRun } from "./route.js";
import { channelOf } from "./store.js";

/** Reads the channels until `signal` aborts. Returns {channels, failure}, updated in place. */
export function pollChannels({ page, signal }) {
  const polled = { channels: [], failure: "" };
  poll("Channels/List", {}, {
    signal,
    onMessage({ channels = [] }) {
      Object.assign(polled, { channels: channels.map(channelOf), failure: "" });
      page.redraw();
    },
    onFailure({ code, message }) {
      // Users who may not read channels see none.
      if (code !== "permission_denied") polled.failure = message;
      page.redraw();
    },
  });
  return polled;
}

const warning = (failure) => failure && callout("bad", "✕", failure);

/** The section of the fleet's view; nothing without channels. */
export const channelSection = ({ channels, failure }) => (channels.length > 0 || failure) && section("channels", "Channels",
  warning(failure),
  channels.length > 0 && table("Channels", ["channel", "model", "last move", "served by", "requests"], channels.map((it) => [
    h("a", { href: toChannel(it.channel), "data-channel": it.channel }, it.channel),
    modelOf(it), timeOf(it), servedBy(it), requestsOf(it.move),
  ])));

const timeOf = ({ at }) => clock(Date.parse(at), now());

const nameModel = ({ move: { run, cycle, base } }) => (run ? `${run}/${cycle}` : base?.path);

function modelOf(channel) {
  const { run, base } = channel.move;
  if (run) return h("a", { href: toRun(run) }, nameModel(channel));
  return base ? h("code", base.path) : "none: forgotten";
}

function servedBy({ move: { serving }, agents }) {
  if (!serving) return "not served";
  return agents.length ? agents.map((name, at) => [at > 0 && ", ", h("a", { href: toBox(name) }, name)]) : "no agent has loaded this model yet";
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
  const over = it?.run ? `${it.run}/${it.cycle}` : "the base";
  const evidence = it && `${points}${it.live ? " by ratings" : ""} over ${over}, p = ${it.p.toFixed(2)}`;
  return [evidence, reason].filter(Boolean).join("; ") || "–";
}

export function open({ page, route, signal }) {
  let moves = [];
  /** The move to whose model a roll-back returns, if there is one. */
  let before = null;
  let failure = "";
  poll("Channels/History", { channel: route.id }, {
    signal,
    onMessage(answer) {
      moves = answer.moves.map(channelOf);
      before = moves.find((it) => it.number === Number(answer.rollBackTo));
      failure = "";
      page.redraw();
    },
    onFailure(error) {
      failure = error.message;
      page.redraw();
    },
  });
  const rollBack = () => page.steer.rollBack(route.id, moves.at(-1).number, nameModel(before));

  const draw = () => {
    const last = moves.at(-1);
    if (!last) return empty(failure || `Loading ${route.id} …`, " ", h("a", { href: "#/" }, "All channels"));
    const { move } = last;
    const address = `${location.origin}/v1`;
    const question = JSON.stringify({ model: route.id, messages: [{ role: "user", content: "Hello" }] });
    const access = page.isOpen() ? "" : ` --cacert DIR/ca.pem -H "authorization: Bearer $(cat DIR/bearer.jwt)"`;
    return [
      warning(failure),
      h("header.panel", { "data-channel": route.id, "data-move": last.number },
        h("div.tools", h("h1", route.id), h("span.end", before && page.may()
          && button("Roll back", rollBack, { "data-action": "roll-back" }))),
        facts([["model", modelOf(last)], ["last move", timeOf(last)], ["served by", servedBy(last)], ["pool", move.serving?.pool],
          ["agents at most", move.serving?.replicas], ["requests", requestsOf(move)]])),
      move.serving && section("use", "Use", note("Clients of OpenAI’s API use the address ", h("code", address), " and the model ", h("code", route.id),
        access && ["; their key is the text of ", h("code", "bearer.jwt"), " in the directory of a user’s credentials, ", h("code", "DIR")], "."),
        command(`curl${access} ${address}/chat/completions -H 'content-type: application/json' -d '${question}'`)),
      section("moves", "Moves", table("Moves", ["move", "at", "model", "by", "reason"],
        moves.toReversed().map((it) => [it.number, timeOf(it), modelOf(it), it.move.user || "–", reasonOf(it.move)]))),
    ];
  };
  return { title: () => route.id, draw };
}
