// Opens views, and has what all of them share: the fleet's stream, the user, keyboard shortcuts, the
// theme and the state of the connection.

import { call, follow, gateway, signIn, signInWithCode, takeLinkCode } from "./api.js";
import { patch, perFrame } from "./dom.js";
import { button, empty } from "./parts.js";
import { parse, toRun } from "./route.js";
import { emptyFleet, mergeFleet } from "./store.js";

const TICK_MS = 1000, CHORD_MS = 1500;
const THEMES = { auto: "◑", light: "☀", dark: "☾" };
const VIEWS = {
  fleet: () => import("./fleet.js"), box: () => import("./box.js"), run: () => import("./run.js"),
  samples: () => import("./samples.js"), compare: () => import("./compare.js"), channel: () => import("./channels.js"),
};
const dialogs = () => import("./dialogs.js");
const byId = (id) => document.getElementById(id);

const root = document.documentElement;
const main = byId("main");
let hello = null;
let view = null;
let current = null;
let viewAbort = new AbortController();
let retryAt = 0;
/** 0 until the page is laid out; nothing is drawn before that. */
let width = 0;
/** The sign-in dialog was cancelled. */
let isSignedOut = false;

const redraw = perFrame(() => {
  if (!view || !width) return;
  document.title = [view.title(), "Flotilla"].filter(Boolean).join(" · ");
  // What was loaded before stays visible.
  patch(main, [isSignedOut && signInHint(), (!isSignedOut || page.isLoaded) && view.draw()]);
});

function askSignIn() {
  isSignedOut = false;
  gateway.dispatchEvent(new Event("sign-in-required"));
}

const signInHint = () => empty("This fleet is closed. Sign in to see runs and agents. ", button("Sign in", askSignIn));

const named = (run, name) => (name && name !== run ? `${run} (${name})` : run);

/** The interface that views receive. */
const page = {
  fleet: emptyFleet(),
  /** False until the first data: an empty fleet is not an unknown one. */
  isLoaded: false,
  redraw,
  width: () => width,
  /** Calls need no bearer. */
  isOpen: () => Boolean(hello?.open),
  may: () => Boolean(hello?.open || /operator|admin/.test(hello?.scope)),
  go: (hash) => { location.hash = hash; },
  steer: {
    pause: (run, name) => steer("Runs/Pause", { run }, { title: `Pause ${run}?`, verb: "Pause", reason: true, done: `${run} paused`,
      text: [`Agents finish the jobs they hold; no new jobs of ${named(run, name)} start until it is resumed.`] }),
    resume: (run, name) => steer("Runs/Resume", { run }, { title: `Resume ${run}?`, verb: "Resume", done: `${run} resumed`,
      text: [`${named(run, name)} continues from where it was paused.`] }),
    cancel: (run, name) => steer("Runs/Cancel", { run }, { title: `Cancel ${run}?`, verb: "Cancel run", tone: "bad", reason: true,
      done: `${run} cancelled`, dismiss: page.fleet.runs.get(run)?.state === "paused" ? "Keep paused" : "Keep running",
      text: [`${named(run, name)} ends now and cannot be resumed.`, "Its checkpoints and samples stay in the store."] }),
    drain: (agent) => steer("Fleet/Drain", { agent }, { title: `Drain ${agent}?`, verb: "Drain", done: `${agent} is draining`,
      text: [`${agent} finishes its current jobs, accepts no new ones, and leaves the fleet.`,
        "To bring it back, start the agent on its host again."] }),
    rollBack: (channel, number, model) => steer("Channels/RollBack", { channel, number }, { title: `Roll back ${channel}?`, verb: "Roll back",
      reason: true, done: `${channel} names ${model} again`, text: [`${channel} will name ${model} again. Agents load it; requests go on.`] }),
    async start() {
      const { startRun, toast } = await dialogs();
      const run = await startRun((request) => call("Runs/Submit", request));
      if (!run) return;
      toast(`${run} started`);
      page.go(toRun(run));
    },
  },
};

async function steer(method, message, { done, ...question }) {
  const { confirmAction, toast } = await dialogs();
  const answer = await confirmAction(question);
  if (!answer) return;
  await call(method, { ...message, ...(answer.reason && answer) }).then(() => toast(done), (error) => toast(error.message, "bad"));
  gateway.dispatchEvent(new Event("changed"));
}

// ---- views

async function navigate() {
  const to = parse(location.hash);
  const isOtherView = to.view !== current?.view || to.id !== current?.id;
  current = to;
  viewAbort.abort();
  viewAbort = new AbortController();
  const { signal } = viewAbort;
  const { open } = await VIEWS[to.view]();
  if (signal.aborted) return;
  if (isOtherView) {
    main.replaceChildren();
    main.dataset.view = to.view;
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  view = open({ page, route: to, signal });
  redraw();
}

setInterval(() => {
  if (view?.ticks) redraw();
  showConnection();
}, TICK_MS);
new ResizeObserver(([{ contentRect }]) => {
  width = Math.floor(contentRect.width);
  redraw();
}).observe(main);

// ---- the connection

async function loadHello() {
  const before = hello?.version;
  hello = await call("Fleet/Hello").catch(() => hello);
  if (!hello) return;
  byId("who").textContent = [hello.open ? "open fleet" : hello.name, hello.scope, hello.version].filter(Boolean).join(" · ");
  redraw();
  const { toast } = await dialogs();
  if (before && before !== hello.version) toast(`The gateway was upgraded to ${hello.version}: reload this page`);
  // Loads all views now, so that they work without a connection.
  Object.values(VIEWS).forEach((load) => load());
}

gateway.addEventListener("link", ({ detail: { connected, retryAt: next } }) => {
  const isBack = connected && root.dataset.connected === "no";
  root.dataset.connected = connected ? "yes" : "no";
  retryAt = connected ? 0 : next;
  showConnection();
  if (!isBack) return;
  // An empty fleet sends no messages, so an open stream is enough.
  page.isLoaded = true;
  loadHello();
});

function showConnection() {
  byId("lost").hidden = !retryAt;
  const seconds = Math.ceil((retryAt - Date.now()) / 1000);
  byId("retry").textContent = seconds > 0 ? ` in ${seconds} s` : " now";
}

let asking = false;
let hadBearer = false;
/** The reason why the last attempt to sign in failed. */
let signInProblem = "";
gateway.addEventListener("sign-in-required", async () => {
  // Who cancelled the dialog is not asked again by each view.
  if (asking || isSignedOut) return;
  asking = true;
  const refused = hadBearer && "Bearer rejected: it may be expired or revoked.";
  const bearer = await (await dialogs()).askBearer(signInProblem || refused);
  asking = false;
  signInProblem = "";
  hadBearer = Boolean(bearer);
  byId("enter").hidden = hadBearer;
  isSignedOut = !hadBearer;
  redraw();
  if (hadBearer) signIn(bearer);
});

/** Signs in if the address has the code of a link of `flotilla open`. Returns true if it did. */
async function signInByLink() {
  const code = takeLinkCode();
  if (!code) return false;
  try {
    await signInWithCode(code);
    hadBearer = true;
    return true;
  } catch ({ message }) {
    // A page that shows a fleet stays as it is.
    if (hello) (await dialogs()).toast(message, "bad");
    else {
      signInProblem = message;
      isSignedOut = false;
    }
    return false;
  }
}

// ---- keyboard shortcuts

let chord = 0;

addEventListener("keydown", (event) => {
  const { key, target, timeStamp } = event;
  const isTyping = target.closest("input:not([type=checkbox]), textarea, select, dialog");
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping) return;
  const isChord = timeStamp - chord < CHORD_MS;
  chord = key === "g" ? timeStamp : 0;
  const actions = {
    "?": showShortcuts, "/": () => main.querySelector("[data-filter]")?.focus(), j: () => toRow(1), k: () => toRow(-1),
    ...(target.closest("[data-row]") && { ArrowDown: () => toRow(1), ArrowUp: () => toRow(-1) }),
    ...(isChord && { f: () => toSection("boxes"), r: () => toSection("runs") }),
  };
  if (!actions[key]) return;
  event.preventDefault();
  actions[key]();
});

async function showShortcuts() {
  (await dialogs()).showKeys();
}

function toRow(by) {
  const rows = [...main.querySelectorAll("[data-row]")];
  const from = rows.findIndex((row) => row.contains(document.activeElement));
  const row = rows[from < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, from + by))];
  (row?.hasAttribute("tabindex") ? row : row?.querySelector("a"))?.focus();
  row?.scrollIntoView({ block: "nearest" });
}

async function toSection(id) {
  if (current.view !== "fleet") {
    page.go("#/");
    await navigate();
  }
  // After the frame that draws it.
  requestAnimationFrame(() => requestAnimationFrame(() => {
    byId(id)?.focus({ preventScroll: true });
    byId(id)?.scrollIntoView();
  }));
}

// ---- the theme, and the buttons of the header

function setTheme(name) {
  root.dataset.theme = name;
  byId("theme").textContent = THEMES[name];
  byId("theme").setAttribute("aria-label", `theme: ${name}`);
  localStorage.setItem("flotilla.theme", name);
}
const savedTheme = localStorage.getItem("flotilla.theme");
setTheme(savedTheme in THEMES ? savedTheme : "auto");

byId("theme").onclick = () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(root.dataset.theme) + 1) % names.length]);
};
byId("keys").onclick = showShortcuts;
byId("enter").onclick = askSignIn;
byId("skip").onclick = (event) => {
  event.preventDefault();
  main.focus();
};

// ---- the start

await signInByLink();
gateway.addEventListener("signed-in", navigate);
addEventListener("hashchange", async () => {
  // A link in a tab that shows the page already: all streams begin again, as the user of the link.
  if (await signInByLink()) location.reload();
  else navigate();
});
follow("Fleet/Watch", {}, {
  signal: new AbortController().signal,
  onMessage(change, first) {
    page.fleet = mergeFleet(page.fleet, change, first);
    redraw();
  },
  isOver: () => false,
  onFailure: async ({ message }) => (await dialogs()).toast(`Cannot watch the fleet: ${message}`, "bad"),
});
navigate();
