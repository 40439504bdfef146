// @ts-check
// Parts that several pages have.

import { h } from "./dom.js";
import { local, utc } from "./format.js";

const SAID_MS = 1500; // for which a button says that it has copied

/** A moment, local, with UTC in its title. @param {string | number | null} moment ISO, or ms since the epoch */
export function time(moment) {
  if (moment === null) return "–";
  const date = new Date(moment);
  return h("time", { datetime: date.toISOString(), title: utc(date) }, local(date));
}

/** @param {string} text what is copied @param {string} [label] */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet small", onclick: copy }, label);
  async function copy() {
    const copied = await navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
    button.textContent = copied ? "Copied" : "Can not copy: select it";
    setTimeout(() => (button.textContent = label), SAID_MS);
  }
  return button;
}

/** A value in letters of one width, with a button that copies it. @param {string} text */
export function copied(text) {
  return h("span", { class: "copied" }, h("code", null, text), copyButton(text));
}

/** A text in which what stands between backticks is code. @param {string} text */
export function words(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", null, part) : part));
}

/**
 * What to do where there is nothing to show.
 * @param {string} title @param {string} text @param {...import("./dom.js").Child} more
 */
export function empty(title, text, ...more) {
  return h("div", { class: "empty" }, h("strong", null, title), h("p", null, words(text), more));
}

/** A name of any length in one line of a table; its title has it whole. @param {string | null} text */
export function name(text) {
  return text === null ? "–" : h("span", { class: "name", title: text }, text);
}

const GLYPHS = { good: "●", warn: "▲", bad: "■", off: "○" };

/** @typedef {keyof typeof GLYPHS} Level */

/**
 * A state in words; sign and colour say the same.
 * @param {Level} level @param {string} words @param {string} [title]
 */
export function state(level, words, title) {
  return h(
    "span",
    { class: `state ${level}`, title },
    h("span", { "aria-hidden": "true" }, GLYPHS[level]),
    ` ${words}`,
  );
}

/**
 * What a source failed with, above what it brought before.
 * @param {import("./poll.js").Poll<any>} poll @param {string} what
 */
export function trouble(poll, what) {
  if (!poll.error) return null;
  const since = poll.at === null ? "" : [" Shown is what was there at ", time(poll.at), "."];
  return h(
    "div",
    { class: "trouble", role: "status" },
    h("span", null, `${what} could not be read: ${poll.error.message}.`, since),
    h("button", { type: "button", class: "quiet small", onclick: () => poll.refresh() }, "Try again"),
  );
}

/**
 * @param {string} label
 * @param {readonly (string | [value: string, words: string])[]} options a string stands for itself
 * @param {string} chosen @param {(value: string) => void} onChange
 */
export function select(label, options, chosen, onChange) {
  const pairs = options.map((option) => (typeof option === "string" ? [option, option] : option));
  const items = pairs.map(([value, words]) => h("option", { value, selected: value === chosen }, words));
  const box = h("select", { onchange: () => onChange(box.value) }, items);
  return h("label", { class: "field" }, h("span", null, label), box);
}

/** Head cells; those of numbers stand at the right. @param {(string | [text: string, title: string])[]} names where one
 * begins with `#`, its column has numbers */
export function headRow(names) {
  return h(
    "tr",
    null,
    names.map((name) => {
      const [text, title] = Array.isArray(name) ? name : [name, null];
      return h("th", { scope: "col", class: text.startsWith("#") ? "number" : null, title }, text.replace(/^#/, ""));
    }),
  );
}

/**
 * A table that scrolls within its place where that is narrow.
 * @param {Parameters<typeof headRow>[0]} columns @param {any} body its rows, or the tbody that gets them
 * @param {import("./dom.js").Child} [foot] the row of sums
 */
export function table(columns, body, foot = null) {
  const rows = body instanceof Element ? body : h("tbody", null, body);
  const all = h("table", { class: "rows" }, h("thead", null, headRow(columns)), rows, foot && h("tfoot", null, foot));
  return h("div", { class: "scroll" }, all);
}

/**
 * A row that is named by its first cell.
 * @param {import("./dom.js").Child} head @param {...import("./dom.js").Child} cells
 */
export function row(head, ...cells) {
  return h("tr", null, h("th", { scope: "row" }, head), cells);
}

/** @param {...import("./dom.js").Child} children */
export function number(...children) {
  return h("td", { class: "number" }, children);
}
