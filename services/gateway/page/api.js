// Calls the gateway and follows its streams, with retries. Knows nothing about the messages.

const BEARER = "flotilla.bearer";
const CALL_MS = 150_000, LOGIN_MS = 20_000, POLL_LIMIT_MS = 30_000;
const RETRY_FIRST_MS = 500, RETRY_MAX_MS = 10_000, POLL_MS = 5000;
/** A stream that is silent for this long is checked with a probe, as it may be cut off. */
const SILENCE_MS = 30_000, PROBE_MS = 10_000;
/** Browsers allow six connections per host, so hidden pages close theirs soon. */
const HIDDEN_MS = 10_000;
/** Errors that a retry cannot change. */
const PERMANENT_ERRORS = /^(not_found|invalid_argument|permission_denied|unimplemented)$/;

/**
 * Sends `link` when a stream breaks or reconnects, `sign-in-required`, and `signed-in`. Receives
 * `changed` after a call that changes what is polled.
 */
export const gateway = new EventTarget();
const emit = (name, detail) => gateway.dispatchEvent(new CustomEvent(name, { detail }));

let bearer = sessionStorage.getItem(BEARER) ?? "";
let skewMs = 0;

/** The gateway's time: this machine's clock may be wrong, and ages are computed from it. */
export const now = () => Date.now() + skewMs;

export function signIn(text) {
  bearer = text.trim().replace(/^Bearer\s+/i, "");
  sessionStorage.setItem(BEARER, bearer);
  emit("signed-in");
}

const LINK_CODE = /^#code=([\w-]+)$/;

/**
 * Returns the one-time code of a sign-in link, or null. Removes it from the address and from the
 * history, so that it is neither reloaded nor shared.
 */
export function takeLinkCode() {
  const code = LINK_CODE.exec(location.hash)?.[1] ?? null;
  if (code) history.replaceState(null, "", "#/");
  return code;
}

/** Signs in with the code of a link. Fails if it was used or has expired. */
export async function signInWithCode(code) {
  const answer = await post("Members/ExchangeLoginCode", { code }, AbortSignal.timeout(LOGIN_MS));
  signIn((await answer.json()).bearer);
}

async function post(method, message, signal) {
  const headers = { "content-type": "application/json", ...(bearer && { authorization: `Bearer ${bearer}` }) };
  const answer = await fetch(`/flotilla.v1.${method}`, { method: "POST", headers, body: JSON.stringify(message), signal });
  const date = Date.parse(answer.headers.get("date"));
  // The header has a resolution of one second.
  if (Math.abs(date - now()) > 2000) skewMs = date - Date.now();
  if (answer.ok) return answer;
  throw callError(await answer.json().catch(() => ({})), answer.status);
}

const callError = ({ code, message }, status) =>
  Object.assign(new Error(message ?? `the gateway returned HTTP status ${status}`), { code: status === 401 ? "unauthenticated" : code });

export async function call(method, message = {}, signal, limitMs = CALL_MS) {
  const signals = [AbortSignal.timeout(limitMs), ...(signal ? [signal] : [])];
  try {
    return await (await post(method, message, AbortSignal.any(signals))).json();
  } catch (error) {
    if (error.name === "TimeoutError") throw new Error(`the gateway did not answer ${method} within ${limitMs / 1000} s`);
    if (error.code === "unauthenticated") emit("sign-in-required");
    throw error;
  }
}

/**
 * Follows a stream until it is complete or `signal` aborts, and reconnects if it breaks. Calls
 * `onMessage(message, first)`; `first` is true for the first message of each connection. After a
 * regular end, `isOver()` decides whether the stream is complete. Calls `onFailure(error)` after an
 * error that a retry cannot change.
 */
export async function follow(method, message, { signal, onMessage, isOver, onFailure }) {
  const link = { lost: true, retryAt: 0 };
  const drop = () => {
    links.delete(link);
    reportLinks();
  };
  links.add(link);
  signal.addEventListener("abort", drop, { once: true });
  for (let failures = 0; !signal.aborted; ) {
    await awake;
    const receive = (item, first) => {
      failures = 0;
      onMessage(item, first);
    };
    try {
      await readStream(method, message, AbortSignal.any([signal, sleeping.signal]), link, receive);
      if (isOver()) return drop();
    } catch (error) {
      if (signal.aborted) return;
      if (sleeping.signal.aborted) continue;
      if (PERMANENT_ERRORS.test(error.code)) {
        drop();
        return onFailure(error);
      }
      if (error.code === "unauthenticated") {
        setLost(link, 0);
        await signedIn();
        continue;
      }
    }
    const wait = Math.min(RETRY_MAX_MS, RETRY_FIRST_MS * 2 ** failures++) * (0.5 + Math.random() / 2);
    setLost(link, Date.now() + wait);
    await pause(wait, signal);
  }
}

/**
 * Calls a method now and every few seconds until `signal` aborts, sooner after `changed` or when the
 * connection is back. Calls `onFailure(error)` after each error, and ends after one that a retry
 * cannot change. Also ends if the user must sign in: after that, views open again.
 */
export async function poll(method, message, { signal, onMessage, onFailure }) {
  while (!signal.aborted) {
    await awake;
    const failure = await call(method, message, signal, POLL_LIMIT_MS)
      .then((answer) => { if (!signal.aborted) onMessage(answer); }, (error) => error);
    if (signal.aborted || failure?.code === "unauthenticated") return;
    // The page says by itself that there is no connection.
    if (failure && !(failure instanceof TypeError)) onFailure(failure);
    if (PERMANENT_ERRORS.test(failure?.code)) return;
    await pause(POLL_MS, signal);
  }
}

async function readStream(method, message, signal, link, onMessage) {
  const cut = new AbortController();
  let lastMessageAt = Date.now();
  const probe = setInterval(() => {
    if (Date.now() - lastMessageAt < SILENCE_MS) return;
    lastMessageAt = Date.now();
    call("Fleet/Hello", {}, AbortSignal.timeout(PROBE_MS)).catch(() => cut.abort());
  }, SILENCE_MS / 3);
  try {
    const answer = await post(method, message, AbortSignal.any([signal, cut.signal]));
    link.lost = false;
    reportLinks();
    let first = true;
    for await (const line of lines(answer.body)) {
      lastMessageAt = Date.now();
      const item = JSON.parse(line);
      if (item.error) throw callError(item.error);
      onMessage(item, first);
      first = false;
    }
  } finally {
    clearInterval(probe);
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      // A line of megabytes has many parts, so they are joined only once.
      parts.push(part.value);
      if (!part.value.includes("\n")) continue;
      const complete = parts.join("").split("\n");
      parts = [complete.pop()];
      yield* complete.filter(Boolean);
    }
    if (parts.join("")) yield parts.join("");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Waits; ends early when the network is back, something was changed, or `signal` aborts. */
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
    gateway.addEventListener("changed", end, { signal: over.signal });
  });

const signedIn = () =>
  new Promise((resolve) => {
    gateway.addEventListener("signed-in", resolve, { once: true });
    emit("sign-in-required");
  });

// ---- the connection state of all streams

const links = new Set();

function setLost(link, retryAt) {
  Object.assign(link, { lost: true, retryAt });
  reportLinks();
}

function reportLinks() {
  const lost = [...links].filter((link) => link.lost);
  emit("link", { connected: !lost.length, retryAt: Math.max(0, ...lost.map((link) => link.retryAt)) });
}

// ---- a hidden page has no streams

let sleeping = new AbortController();
let awake = Promise.resolve();
let wake = () => {};
let sleepTimer = 0;

document.addEventListener("visibilitychange", () => {
  clearTimeout(sleepTimer);
  if (document.hidden) sleepTimer = setTimeout(sleep, HIDDEN_MS);
  else wake();
});

function sleep() {
  awake = new Promise((resolve) => {
    wake = () => {
      // Only once, because the resumed streams depend on the new controller.
      wake = () => {};
      sleeping = new AbortController();
      resolve();
    };
  });
  sleeping.abort();
}
