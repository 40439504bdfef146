// @ts-check
// Where the time of one call went: its phases, the servers that were tried, and the first chunk, on one axis.

import { speaksAgainst } from "./callstats.js";
import { ticks } from "./charts.js";
import { h } from "./dom.js";
import { duration, roundDuration } from "./format.js";

/**
 * @typedef {{ name: string, start_ms: number, end_ms: number, within_chat: boolean }} Phase
 * @typedef {{ deployment: string, outcome: string, start_ms: number, end_ms: number | null }} Attempt
 */

/** What the time of a phase was spent on, and what the phase is. */
const PHASES = /** @type {Record<string, [kind: string, words: string]>} */ ({
  authenticate: ["own", "the key is looked up"],
  canonicalise: ["own", "the request is read, checked and brought into canonical form"],
  "cache.lookup": ["own", "the response cache is asked"],
  admit: ["own", "all limits are reserved"],
  queue: ["wait", "it waits for its turn"],
  route: ["own", "a server is chosen"],
  chat: ["server", "from the first attempt to the end of the answer"],
  replay: ["own", "an answer that was kept, or another call's, is sent"],
  settle: ["own", "receipt, limits and cache are brought up to date"],
});

const BAR_PX_MIN = 2; // as wide as the shortest phase is drawn

export const KINDS = /** @type {const} */ ([
  ["own", "the gateway"],
  ["wait", "waiting"],
  ["server", "a server"],
  ["failed", "a server that failed"],
]);

/** @param {{ duration_ms: number, ttft_ms: number | null, phases: Phase[], attempts: Attempt[] }} call */
export function waterfall(call) {
  const ends = [...call.phases, ...call.attempts].map((each) => each.end_ms ?? 0);
  const whole = Math.max(call.duration_ms, ...ends, 0.001);
  const axis = { whole, first: call.ttft_ms };
  const attempts = call.attempts.map((attempt, index) => attemptRow(attempt, index, axis));
  return h(
    "div",
    { class: "waterfall" },
    h(
      "table",
      null,
      h(
        "thead",
        null,
        h("tr", null, h("th", { scope: "col" }, "Phase"), scale(axis), head("Start", "start"), head("Time")),
      ),
      h(
        "tbody",
        null,
        call.phases.map((phase) => phaseRow(phase, axis)),
      ),
      attempts.length > 0 &&
        h(
          "tbody",
          null,
          h("tr", { class: "sub" }, h("th", { scope: "rowgroup", colspan: 4 }, "Servers tried")),
          attempts,
        ),
    ),
    h(
      "ul",
      { class: "legend" },
      KINDS.map(([kind, words]) => h("li", null, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), words)),
      call.ttft_ms !== null &&
        h(
          "li",
          null,
          h("span", { class: "swatch first", "aria-hidden": "true" }),
          `first chunk after ${duration(call.ttft_ms)}`,
        ),
    ),
  );
}

/** @param {string} text @param {string} [name] */
function head(text, name = "") {
  return h("th", { scope: "col", class: `number ${name}` }, text);
}

/** @typedef {{ whole: number, first: number | null }} Axis  in ms */

/** @param {Axis} axis */
function scale(axis) {
  const steps = ticks(axis.whole, 4).filter((step) => step <= axis.whole);
  const marks = steps.map((step) =>
    placed(h("span", { class: "mark" }, step ? roundDuration(step) : "0"), step / axis.whole),
  );
  return h("th", { scope: "col", class: "track", "aria-label": "On a time axis" }, h("span", { class: "lane" }, marks));
}

/** @param {Phase} phase @param {Axis} axis */
function phaseRow(phase, axis) {
  const [kind, words] = PHASES[phase.name] ?? ["own", ""];
  return row(
    h("span", { class: phase.within_chat ? "within" : "" }, phase.name),
    words,
    kind,
    phase.start_ms,
    phase.end_ms,
    axis,
  );
}

/** @param {Attempt} attempt @param {number} index @param {Axis} axis */
function attemptRow(attempt, index, axis) {
  const bad = speaksAgainst(attempt.outcome);
  const name = [`${index + 1}. ${attempt.deployment} `, h("span", { class: bad ? "bad" : "dim" }, attempt.outcome)];
  return row(name, "", bad ? "failed" : "server", attempt.start_ms, attempt.end_ms ?? axis.whole, axis);
}

/**
 * @param {any} name @param {string} words @param {string} kind @param {number} start @param {number} end
 * @param {Axis} axis
 */
function row(name, words, kind, start, end, axis) {
  const bar = placed(h("span", { class: `span ${kind}` }), start / axis.whole);
  bar.style.width = percent(Math.max(end - start, 0) / axis.whole);
  const first = axis.first !== null && kind === "server" && axis.first >= start && axis.first <= end;
  return h(
    "tr",
    { title: words || null },
    h("th", { scope: "row" }, name),
    h(
      "td",
      { class: "track" },
      h(
        "span",
        { class: "lane" },
        bar,
        first &&
          placed(h("span", { class: "first", title: "first chunk" }), /** @type {number} */ (axis.first) / axis.whole),
      ),
    ),
    h("td", { class: "number start" }, duration(start)),
    h("td", { class: "number" }, duration(end - start)),
  );
}

/** @param {any} element @param {number} part of the axis */
function placed(element, part) {
  element.style.left = `min(${percent(part)}, calc(100% - ${BAR_PX_MIN}px))`;
  return element;
}

/** @param {number} part */
function percent(part) {
  return `${(100 * part).toFixed(3)}%`;
}
