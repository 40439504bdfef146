// @ts-check
// Elements that several pages use.

import { h } from "./dom.js";
import { local, utc } from "./format.js";

const COPIED_MS = 1500; // how long a button confirms that it copied

/** A local time, with UTC in its title. @param {string | number | null} moment ISO, or ms since the epoch */
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
    button.textContent = copied ? "Copied" : "Failed: select the text";
    setTimeout(() => (button.textContent = label), COPIED_MS);
  }
  return button;
}

/** A value in monospace, with a button that copies it. @param {string} text */
export function copied(text) {
  return h("span", { class: "copied" }, h("code", null, text), copyButton(text));
}

/** A text in which parts between backticks become code. @param {string} text */
export function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", null, part) : part));
}

/**
 * A message for an empty page or table, with what to do.
 * @param {string} title @param {string} text @param {...import("./dom.js").Child} more
 */
export function empty(title, text, ...more) {
  return h("div", { class: "empty" }, h("strong", null, title), h("p", null, withCode(text), more));
}

/** A name, cut to one line of a table; its title has all of it. @param {string | null} text */
export function name(text) {
  return text === null ? "–" : h("span", { class: "name", title: text }, text);
}

const GLYPHS = { good: "●", warn: "▲", bad: "■", off: "○" };

/** @typedef {keyof typeof GLYPHS} Level */

/**
 * A state as sign, colour and text.
 * @param {Level} level @param {string} label @param {string} [title]
 */
export function state(level, label, title) {
  return h(
    "span",
    { class: `state ${level}`, title },
    h("span", { "aria-hidden": "true" }, GLYPHS[level]),
    ` ${label}`,
  );
}

/**
 * The error of a source, shown above its last value.
 * @param {import("./poll.js").Poll<any>} poll @param {string} what
 */
export function trouble(poll, what) {
  if (!poll.error) return null;
  const since = poll.at === null ? "" : [" Data as of ", time(poll.at), "."];
  return h(
    "div",
    { class: "trouble", role: "status" },
    h("span", null, `Cannot load ${what}: ${poll.error.message}.`, since),
    h("button", { type: "button", class: "quiet small", onclick: () => poll.refresh() }, "Retry"),
  );
}

/**
 * @param {string} label
 * @param {readonly (string | [value: string, label: string])[]} options a string is both value and label
 * @param {string} chosen @param {(value: string) => void} onChange
 */
export function select(label, options, chosen, onChange) {
  const pairs = options.map((option) => (typeof option === "string" ? [option, option] : option));
  const items = pairs.map(([value, label]) => h("option", { value, selected: value === chosen }, label));
  const box = h("select", { onchange: () => onChange(box.value) }, items);
  return h("label", { class: "field" }, h("span", null, label), box);
}

/**
 * A choice with groups of options.
 * @param {string} label @param {string} all the label of the first option, whose value is empty
 * @param {[group: string, options: [value: string, label: string][]][]} groups
 * @param {string} chosen @param {(value: string) => void} onChange
 */
export function groupedSelect(label, all, groups, chosen, onChange) {
  const option = (/** @type {[string, string]} */ [value, text]) =>
    h("option", { value, selected: value === chosen }, text);
  const known = groups.some(([, options]) => options.some(([value]) => value === chosen));
  const box = h(
    "select",
    { onchange: () => onChange(box.value) },
    option(["", all]),
    chosen && !known && option([chosen, chosen]),
    groups
      .filter(([, options]) => options.length)
      .map(([group, options]) => h("optgroup", { label: group }, options.map(option))),
  );
  return h("label", { class: "field" }, h("span", null, label), box);
}

/** Head cells. @param {(string | [text: string, title: string])[]} names a name that begins with `#` is the head of a
 * column of numbers, which is aligned to the right */
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
 * A table that scrolls if there is not enough width.
 * @param {Parameters<typeof headRow>[0]} columns @param {any} body its rows, or an existing tbody
 * @param {import("./dom.js").Child} [foot] the row of sums
 */
export function table(columns, body, foot = null) {
  const rows = body instanceof Element ? body : h("tbody", null, body);
  const all = h("table", { class: "rows" }, h("thead", null, headRow(columns)), rows, foot && h("tfoot", null, foot));
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, all);
}

/**
 * A row whose first cell is its header.
 * @param {import("./dom.js").Child} head @param {...import("./dom.js").Child} cells
 */
export function row(head, ...cells) {
  return h("tr", null, h("th", { scope: "row" }, head), cells);
}

/** @param {...import("./dom.js").Child} children */
export function number(...children) {
  return h("td", { class: "number" }, children);
}

/** The lines of a unified diff. @param {string[]} lines */
export function diffOf(lines) {
  const shown = lines.map((line) => {
    const kind = line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : null;
    return h("span", { class: kind }, `${line}\n`);
  });
  return h("pre", { class: "diff", tabindex: 0, role: "region", "aria-label": "Changes" }, shown);
}

/** The ids of the keys in whose name an operator can send requests, each with its tenant.
 * @param {any} keys the reply of `GET /admin/keys` @returns {[value: string, label: string][]} */
export function keyOptions(keys) {
  if (!keys) return [];
  const active = keys.data.filter((/** @type {any} */ key) => key.state === "active");
  const all = /** @type {{ id: string, tenant: string }[]} */ ([...keys.policy_keys, ...active]);
  return all.map(({ id, tenant }) => [id, `${id} of ${tenant}`]);
}
