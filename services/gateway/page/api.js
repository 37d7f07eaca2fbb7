// Decides how the page talks to its gateway: a call, or a stream that is taken up again when it
// breaks. It does not know what messages mean.

const BEARER = "flotilla.bearer";
const CALL_MS = 150_000;
const RETRY_FIRST_MS = 500, RETRY_MAX_MS = 10_000;
/** A stream that says nothing for so long may be cut, and nobody have noticed. */
const QUIET_MS = 30_000, PROBE_MS = 10_000;
/** Browsers have six connections to a host: those of pages that nobody sees are given back soon. */
const HIDDEN_MS = 10_000;
/** Asking again would be answered in the same way. */
const LASTING = /^(not_found|invalid_argument|permission_denied|unimplemented)$/;

/** Says `link` when a stream breaks or is back, `closed` when a bearer is needed, and `opened`. */
export const gateway = new EventTarget();
const say = (what, detail) => gateway.dispatchEvent(new CustomEvent(what, { detail }));

let bearer = sessionStorage.getItem(BEARER) ?? "";
let skewMs = 0;

/** The gateway's time, as silence is measured by it and this machine's clock may be wrong. */
export const now = () => Date.now() + skewMs;

export function useBearer(text) {
  bearer = text.trim().replace(/^Bearer\s+/i, "");
  sessionStorage.setItem(BEARER, bearer);
  say("opened");
}

async function post(method, message, signal) {
  const headers = { "content-type": "application/json", ...(bearer && { authorization: `Bearer ${bearer}` }) };
  const answer = await fetch(`/flotilla.v1.${method}`, { method: "POST", headers, body: JSON.stringify(message), signal });
  const date = Date.parse(answer.headers.get("date"));
  // It tells whole seconds.
  if (Math.abs(date - now()) > 2000) skewMs = date - Date.now();
  if (answer.ok) return answer;
  throw refusal(await answer.json().catch(() => ({})), answer.status);
}

const refusal = ({ code, message }, status) =>
  Object.assign(new Error(message ?? `the gateway returned HTTP status ${status}`), { code: status === 401 ? "unauthenticated" : code });

/** One request, one answer. */
export async function call(method, message = {}, signal) {
  const signals = [AbortSignal.timeout(CALL_MS), ...(signal ? [signal] : [])];
  try {
    return await (await post(method, message, AbortSignal.any(signals))).json();
  } catch (error) {
    if (error.code === "unauthenticated") say("closed");
    throw error;
  }
}

/**
 * Hears a stream until it is over or `signal` aborts: `hear(message, first)`, where `first` is said
 * of each connection's first. When the stream ends well, `isOver()` tells whether that was all;
 * `failed(error)` is called when nothing would come of trying again.
 */
export async function follow(method, message, { signal, hear, isOver, failed }) {
  const link = { lost: true, retryAt: 0 };
  const drop = () => {
    links.delete(link);
    tell();
  };
  links.add(link);
  signal.addEventListener("abort", drop, { once: true });
  for (let failures = 0; !signal.aborted; ) {
    await awake;
    const heard = (item, first) => {
      failures = 0;
      hear(item, first);
    };
    try {
      await listen(method, message, AbortSignal.any([signal, rest.signal]), link, heard);
      if (isOver()) return drop();
    } catch (error) {
      if (signal.aborted) return;
      if (rest.signal.aborted) continue;
      if (LASTING.test(error.code)) {
        drop();
        return failed(error);
      }
      if (error.code === "unauthenticated") {
        lose(link, 0);
        await opened();
        continue;
      }
    }
    const wait = Math.min(RETRY_MAX_MS, RETRY_FIRST_MS * 2 ** failures++) * (0.5 + Math.random() / 2);
    lose(link, Date.now() + wait);
    await pause(wait, signal);
  }
}

async function listen(method, message, signal, link, hear) {
  const cut = new AbortController();
  let heardAt = Date.now();
  const watch = setInterval(() => {
    if (Date.now() - heardAt < QUIET_MS) return;
    heardAt = Date.now();
    call("Fleet/Hello", {}, AbortSignal.timeout(PROBE_MS)).catch(() => cut.abort());
  }, QUIET_MS / 3);
  try {
    const answer = await post(method, message, AbortSignal.any([signal, cut.signal]));
    link.lost = false;
    tell();
    let first = true;
    for await (const line of lines(answer.body)) {
      heardAt = Date.now();
      const item = JSON.parse(line);
      if (item.error) throw refusal(item.error);
      hear(item, first);
      first = false;
    }
  } finally {
    clearInterval(watch);
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = [];
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      // A line of megabytes comes in many parts: joined once, not with each of them.
      held.push(part.value);
      if (!part.value.includes("\n")) continue;
      const whole = held.join("").split("\n");
      held = [whole.pop()];
      yield* whole.filter(Boolean);
    }
    if (held.join("")) yield held.join("");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Shorter where the network is back, or nobody waits any more. */
const pause = (ms, signal) =>
  new Promise((resolve) => {
    const over = new AbortController();
    const end = () => {
      over.abort();
      resolve();
    };
    const timer = setTimeout(end, ms);
    over.signal.addEventListener("abort", () => clearTimeout(timer));
    signal.addEventListener("abort", end, { signal: over.signal });
    addEventListener("online", end, { signal: over.signal });
  });

const opened = () =>
  new Promise((resolve) => {
    gateway.addEventListener("opened", resolve, { once: true });
    say("closed");
  });

// ---- the streams, all together

const links = new Set();

function lose(link, retryAt) {
  Object.assign(link, { lost: true, retryAt });
  tell();
}

function tell() {
  const lost = [...links].filter((link) => link.lost);
  say("link", { connected: !lost.length, retryAt: Math.max(0, ...lost.map((link) => link.retryAt)) });
}

// ---- a page that nobody looks at asks for nothing

let rest = new AbortController();
let awake = Promise.resolve();
let wake = () => {};
let hidden = 0;

document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(sleep, HIDDEN_MS);
  else wake();
});

function sleep() {
  awake = new Promise((resolve) => {
    wake = () => {
      // Once: streams that go on hang on the one that is.
      wake = () => {};
      rest = new AbortController();
      resolve();
    };
  });
  rest.abort();
}
