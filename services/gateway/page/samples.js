// Shows the samples of a cycle, those of a prompt side by side, with filters and search.

import { call } from "./api.js";
import { lines } from "./diff.js";
import { h } from "./dom.js";
import { count, counted, decimal } from "./format.js";
import { button, chip, empty, folded, note, quiet } from "./parts.js";
import { toBox, toRun, toSamples } from "./route.js";
import { samplesPage } from "./store.js";

const PAGE = 20;
/** Longer texts are collapsed. */
const LONG_LINES = 24, LONG_CHARS = 1800;
const TYPING_MS = 300;
const SIGN = { pass: "✓", fail: "✕", error: "⚠" };

export function open({ page, route, signal }) {
  const { id: run, settings } = route;
  const { suite = "", fate = "", text = "" } = settings;
  const opened = new Set();
  let cycle = Number(settings.cycle ?? 0);
  const offset = Number(settings.offset ?? 0);
  const which = suite || settings.which === "heldout" ? "HELDOUT_SAMPLES" : "TRAIN_SAMPLES";
  let answer = null;
  let failure = null;
  let typing = 0;
  let marked = true;
  signal.addEventListener("abort", () => clearTimeout(typing));
  /** Without a cycle in the address, the newest one whose samples are all judged. */
  const chosenCycle = async () => {
    if (settings.cycle !== undefined) return cycle;
    const { cyclesDone = [], cycle: current = 0 } = await call("Runs/Get", { run }, signal);
    return Math.max(...cyclesDone.map((done) => done.cycle ?? 0), Math.min(current, 1));
  };
  chosenCycle()
    .then((it) => call("Runs/Samples", { run, cycle: (cycle = it), which, suite, fate, text, offset, limit: PAGE }, signal))
    .then((it) => { answer = samplesPage(it); }, (error) => { failure = error.message; }).finally(page.redraw);

  /** The address has all settings, also the cycle that was chosen for it. Every other change returns to the first page. */
  const go = (changes) => page.go(toSamples(run, { ...settings, cycle: String(cycle), offset: "", ...changes }));

  const select = (label, options, value, choose) => h("label", `${label} `,
    h("select", { "aria-label": label, onchange: ({ target }) => choose(target.value) },
    options.map(([it, name]) => h("option", { value: it, selected: it === value }, name))));

  function choices() {
    const last = Math.max(cycle, page.fleet.runs.get(run)?.cycles ?? 0);
    const kinds = [["train", "training"], ["heldout", "held-out"], ...(answer?.suites ?? []).map((name) => [`suite ${name}`, name])];
    const oninput = ({ target }) => {
      clearTimeout(typing);
      typing = setTimeout(() => go({ text: target.value }), TYPING_MS);
    };
    const mark = ({ target }) => {
      marked = target.checked;
      page.redraw();
    };
    const kindSettings = (it) => ({ fate: "", suite: it.startsWith("suite ") ? it.slice(6) : "", which: it === "heldout" ? it : "" });
    const byCount = (words) => Object.entries(words ?? {}).sort(([, a], [, b]) => b - a);
    const choice = (name, label) =>
      quiet(label, () => go({ fate: name }), { key: name, "aria-pressed": String(fate === name), "data-choice": name });
    return h("div.tools",
      select("cycle", Array.from({ length: last + 1 }, (_, at) => [at, at]), cycle, (it) => go({ cycle: it, fate: "" })),
      select("prompts", kinds, suite ? `suite ${suite}` : settings.which ?? "train", (it) => go(kindSettings(it))),
      h("input", { type: "search", placeholder: "search prompts and samples", "aria-label": "search prompts and samples",
        "data-filter": true, value: text, oninput }),
      h("label", h("input", { type: "checkbox", checked: marked, onchange: mark }), " highlight differing lines"),
      h("p.chips", { role: "group", "aria-label": "verdict" }, choice("", "all"),
        byCount(answer?.outcomes).map(([name, n]) => choice(name, `${name} ${count(n)}`))),
      answer?.fates && h("p.chips", { role: "group", "aria-label": "kept or reason for dropping" },
        byCount(answer.fates).map(([name, n]) => choice(name, `${name} ${count(n)}`))));
  }

  function pager() {
    const all = answer.promptsInAll;
    // A page with long samples has fewer prompts.
    const last = offset + answer.prompts.length;
    return h("nav.tools", { "aria-label": "pages" }, button("← previous", () => go({ offset: Math.max(0, offset - PAGE) }), { disabled: !offset }),
      `prompts ${count(offset + 1)} – ${count(last)} of ${count(all)}`,
      button("next →", () => go({ offset: last }), { disabled: last >= all }));
  }

  function prompts() {
    if (failure) return empty(failure);
    if (!answer) return empty("Loading samples …");
    if (!answer.prompts.length && !fate && !text) return empty("No samples yet.");
    if (!answer.prompts.length) return empty("No matching prompts. ", button("Show all", () => go({ fate: "", text: "" })));
    return [pager(), answer.prompts.map(promptOf), answer.promptsInAll > PAGE && pager()];
  }

  function promptOf({ promptId, text: promptText, samples, samplesInAll }) {
    // The reference is the kept sample, otherwise the one with the highest reward.
    const reference = samples.find((it) => it.fate === "kept") ?? samples.toSorted((a, b) => b.reward - a.reward)[0];
    const passed = samples.filter((it) => it.outcome === "pass").length;
    return h("article.prompt.panel", { key: promptId, "data-row": true, tabindex: -1, "data-prompt": promptId },
      h("header", h("h2", promptId), h("small", `${passed} of ${counted(samples.length, "sample")} passed`,
        samplesInAll > samples.length && ` (${count(samplesInAll)} in total)`)),
      collapsible(promptId, promptText, () => h("pre.asked", promptText)),
      h("div.samples", samples.map((it) => sampleOf(`${promptId} ${it.index}`, it, marked && it !== reference && reference))));
  }

  const sampleOf = (key, it, reference) => h(`article.sample.is-${it.outcome}`, {
    key, class: it.fate === "kept" && "kept", "data-fate": it.fate, "data-outcome": it.outcome,
  },
  h("header", h("b", `#${it.index}`), h("b.verdict", `${SIGN[it.outcome] ?? "…"} ${it.outcome || "not judged"}`),
    it.outcome && `reward ${decimal(it.reward, 3)}`, it.fate && chip(it.fate, it.fate === "kept" ? "good" : "soft")),
  collapsible(key, it.text, () => it.turns.length ? it.turns.map(turnOf) : h("pre", reference ? markedLines(it.text, reference.text) : it.text)),
  it.cut && note("Truncated: the sample is very long."), it.detail && h("p.detail", it.detail),
  note(counted(it.tokens, "token"), it.finish === "length" && ", stopped at the token limit",
    it.logprob !== null && it.tokens > 0 && `, ${decimal(-it.logprob / it.tokens, 3)} nats per token`,
    it.agent && [", ", h("a", { href: toBox(it.agent) }, it.agent)]));

  /** A turn of the model, and what its environment answered. */
  const turnOf = ({ text: said, observation }) => [h("pre.turn", said), observation && h("pre.asked.observation", observation)];

  function collapsible(key, full, content) {
    const n = full.split("\n").length;
    if (n <= LONG_LINES && full.length <= LONG_CHARS) return content();
    return folded(key, `${counted(n, "line")}: ${full.slice(0, 90).trim()} …`, { opened, redraw: page.redraw }, content);
  }

  const draw = () => [
    h("h1", "Samples", h("small", h("a", { href: toRun(run) }, run))), choices(),
    h("div", { "aria-busy": String(!answer && !failure) }, prompts()),
  ];
  return { title: () => `samples of ${run}`, draw };
}

const markedLines = (text, reference) => lines(text, reference).map(({ line, same }) => [h(same ? "span" : "mark", line || " "), "\n"]);
