// Small elements that all views use.

import { h } from "./dom.js";
import { SIGNS } from "./format.js";

const sign = (it) => h("span.sign", { "aria-hidden": "true" }, it);

export const state = (word) => h(`span.state.is-${word}`, { "data-state": word }, sign(SIGNS[word] ?? "?"), ` ${word}`);
export const chip = (text, tone = "", title) => h("span.chip", { class: tone, title }, text);
export const callout = (tone, mark, ...content) => h("p.callout", { class: tone }, sign(mark), h("span", content));
export const button = (text, onclick, props) => h("button", { type: "button", onclick, ...props }, text);
export const quiet = (text, onclick, props) => button(text, onclick, { ...props, class: "quiet" });
export const note = (...content) => h("p.note", content);
export const empty = (...content) => h("p.empty", content);

const bar = (role, name, share, text) => ({ role, "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100,
  "aria-valuenow": Math.round(share * 100), "aria-valuetext": text });
const fill = (share) => h("span.fill", { "width%": Math.max(0, Math.min(1, share)) * 100 });

export const meter = (name, share, text, tone) =>
  h("div.meter", { class: tone, ...bar("meter", name, share, text) },
    h("span.name", name), h("span.track", fill(share)), h("span.value", text));

export const progress = (name, done, total) =>
  h("div.progress", bar("progressbar", name, total ? done / total : 0), fill(total ? done / total : 0));

export const submit = (text, props) => h("button", { type: "submit", value: "confirm", ...props }, text);

/** A shell command with a copy button. */
export const command = (text) => h("span.command", h("code", text), quiet("copy", ({ target }) =>
  navigator.clipboard?.writeText(text).then(() => { target.textContent = "copied"; }), { "aria-label": `copy ${text}` }));

/** A table; the first cell of each row is its heading. */
export const table = (caption, headings, rows, tone) =>
  h("div.wide", { tabindex: 0, role: "region", "aria-label": caption }, h("table", { class: tone },
    h("thead", h("tr", headings.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", rows.map(([first, ...cells]) => h("tr", h("th", { scope: "row" }, first), cells.map((cell) => h("td", cell)))))));

/** Allows a line break after each dot and underscore of a setting's name. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, at) => (at ? [h("wbr"), part] : [part]));

/** A table of settings, which is shown whole; the first cell of each row is the setting's name. */
export const settingsTable = (caption, headings, rows) =>
  table(caption, headings, rows.map(([name, ...values]) => [breakable(name), ...values]), "settings");

/** A section whose content is only drawn while it is open; `opened` has the keys of open ones. */
export const folded = (key, summary, { opened, redraw }, content) =>
  h("details", { key, open: opened.has(key), ontoggle: ({ currentTarget }) => {
    opened[currentTarget.open ? "add" : "delete"](key);
    redraw();
  } }, h("summary", summary), opened.has(key) && content());

export const facts = (pairs) =>
  h("dl.facts", pairs.filter(([, value]) => value).map(([name, value]) => h("div", h("dt", name), h("dd", value))));

export const section = (id, name, ...content) =>
  h("section", { key: id, "aria-labelledby": id }, h("h2", { id, tabindex: -1 }, name), content);
