// Dialogs and messages. Knows nothing about the calls that they confirm.

import { h, patch } from "./dom.js";
import { bytes, count } from "./format.js";
import { button, callout, facts, note, quiet, submit, table } from "./parts.js";

const TOASTS_MAX = 3;
const TOAST_MS = 6000, ALARM_MS = 15_000;

/** Shows a message for some seconds; removes the oldest of too many. */
export function toast(text, tone = "") {
  const host = document.getElementById("toasts");
  const node = document.createElement("div");
  patch(node, [h("p.toast", { class: tone }, text, quiet("×", () => node.remove(), { "aria-label": "dismiss" }))]);
  host.append(node);
  if (host.childElementCount > TOASTS_MAX) host.firstElementChild.remove();
  setTimeout(() => node.remove(), tone === "bad" ? ALARM_MS : TOAST_MS);
}

/** Shows a dialog drawn by `draw(close, redraw)`. Resolves to the value it was closed with, or null. */
function modal(name, onConfirm, draw) {
  return new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    let answer = null;
    const close = (value = null) => {
      answer = value;
      dialog.close();
    };
    const onsubmit = (event) => {
      event.preventDefault();
      onConfirm(close, event.currentTarget.elements);
    };
    const redraw = () => patch(dialog, [h("form", { onsubmit }, h("h2", name), draw(close, redraw))]);
    dialog.setAttribute("aria-label", name);
    dialog.onclose = () => {
      dialog.remove();
      resolve(answer);
    };
    document.body.append(dialog);
    redraw();
    dialog.showModal();
  });
}

const buttonRow = (close, buttons, dismiss = "Cancel") => h("p.feet", quiet(dismiss, () => close()), buttons);

/** Asks for a confirmation. Resolves to {reason}, or null if it was cancelled. */
export const confirmAction = ({ title, text, verb, tone, reason, dismiss }) =>
  modal(title, (close, fields) => close({ reason: fields.reason?.value.trim() }), (close) => [
    text.map((it) => h("p", it)),
    reason && h("label", "Reason (recorded in the log)", h("input", { name: "reason", autocomplete: "off", maxlength: 500 })),
    buttonRow(close, submit(verb, { class: tone, "data-action": "confirm" }), dismiss),
  ]);

/** A bearer is one line. */
function submitOnEnter(event) {
  if (event.key !== "Enter") return;
  event.preventDefault();
  event.currentTarget.form.requestSubmit();
}

/** Asks for a bearer, with the problem of the last one. Resolves to its text, or null if it was cancelled. */
export const askBearer = (problem) =>
  modal("This fleet is closed", (close, fields) => close(fields.bearer.value), (close) => [
    problem && callout("bad", "✕", problem),
    h("p", "Run ", h("code", "flotilla open --dir DIR"), " with your credentials directory: it prints a link that signs in here."),
    h("p", "Or paste the contents of its ", h("code", "bearer.jwt"), ".",
      " It is kept until this tab is closed and sent only to this gateway."),
    h("textarea", { name: "bearer", rows: 5, required: true, spellcheck: "false", autocomplete: "off",
      "aria-label": "contents of bearer.jwt", onkeydown: submitOnEnter }),
    buttonRow(close, submit("Sign in")),
  ]);

const KEYS = [
  ["?", "show keyboard shortcuts"], ["g f", "go to agents"], ["g r", "go to runs"], ["j k ↓ ↑", "next and previous row"],
  ["Enter", "open"], ["/", "filter or search"], ["← →", "in charts: previous and next cycle; in the timeline: bar"],
  ["+ − 0", "in the timeline: zoom in, out, show all"], ["Shift ← →", "in the timeline: move"],
];

export const showKeys = () => modal("Keyboard shortcuts", (close) => close(), () => [
  h("dl.keys", KEYS.map(([key, action]) => h("div", h("dt", h("kbd", key)), h("dd", action)))), h("p.feet", submit("Close")),
]);

/** Asks for a spec and its files, and submits them with `send`. Resolves to the run, or null. */
export function startRun(send) {
  const files = new Map();
  let result = null;
  const sendSpec = async (checkOnly, close, redraw) => {
    result = note("Checking …");
    redraw();
    try {
      const named = Object.fromEntries([...files.values()].map(({ name, content }) => [name, content]));
      const { run, data = {} } = await send({ specYaml: spec, files: named, checkOnly });
      if (run) return close(run);
      result = checkReport(data);
    } catch (error) {
      // With a line of the spec and a mark below it.
      result = callout("bad", "✕", h("pre.mistake", error.message));
    }
    redraw();
  };
  let spec = "";
  let redrawDialog = () => {};
  return modal("Start a run", (close) => sendSpec(false, close, redrawDialog), (close, redraw) => {
    redrawDialog = redraw;
    const addFiles = async ({ currentTarget }) => {
      for (const file of [...currentTarget.files]) files.set(file.name, { name: file.name, size: file.size, content: await base64(file) });
      redraw();
    };
    const fileRow = ([key, it]) => h("li.tools", { key },
      h("input", { value: it.name, "aria-label": `name of ${key} in the spec`, oninput: ({ target }) => { it.name = target.value; } }),
      h("small", bytes(it.size)), quiet("×", () => { files.delete(key); redraw(); }, { "aria-label": `remove ${key}` }));
    return [
      h("label", "Run spec (YAML, as for flotilla run submit)",
        h("textarea.spec", { rows: 12, required: true, spellcheck: "false", oninput: ({ target }) => { spec = target.value; } })),
      h("label", "Files referenced in the spec", h("input", { type: "file", multiple: true, onchange: addFiles })), h("ul", [...files].map(fileRow)),
      h("div", { role: "status" }, result),
      buttonRow(close, [button("Check", () => sendSpec(true, close, redraw), { "data-action": "check" }),
        submit("Start", { "data-action": "confirm" })]),
    ];
  });
}

const base64 = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

const lengths = ({ min = 0, median = 0, max = 0 } = {}) => (max ? `${count(median)} (${count(min)} – ${count(max)})` : "–");

const checkReport = ({ files = [], warnings = [], samplesPerCycle, heldoutSamplesPerCycle }) => [
  callout("good", "✓", "The spec is valid."), warnings.map((text) => callout("warn", "▲", text)),
  facts([["samples per cycle", samplesPerCycle], ["held-out samples per cycle", heldoutSamplesPerCycle]]),
  table("Files", ["field", "file", "lines", "duplicates", "bytes per prompt", "tokens per prompt"],
    files.map((it) => [it.field, it.file, count(it.lines ?? 0), count(it.duplicates ?? 0),
      lengths(it.promptBytes), lengths(it.promptTokens)])),
];
