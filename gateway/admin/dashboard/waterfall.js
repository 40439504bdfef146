// @ts-check
// A waterfall of one call: its phases, its attempts and the first chunk, on one time axis.

import { isDeploymentFault } from "./callstats.js";
import { ticks } from "./charts.js";
import { h } from "./dom.js";
import { duration, roundDuration } from "./format.js";

/**
 * @typedef {{ name: string, start_ms: number, end_ms: number, within_chat: boolean }} Phase
 * @typedef {{ deployment: string, outcome: string, start_ms: number, end_ms: number | null }} Attempt
 */

/** The kind and a description of each phase. */
const PHASES = /** @type {Record<string, [kind: string, text: string]>} */ ({
  authenticate: ["own", "looks up the API key"],
  canonicalise: ["own", "reads, checks and canonicalises the request"],
  "cache.lookup": ["own", "looks up the response cache"],
  admit: ["own", "reserves all limits"],
  queue: ["wait", "waits for a concurrency slot"],
  route: ["own", "chooses a deployment"],
  chat: ["server", "from the first attempt to the end of the answer"],
  replay: ["own", "sends a cached answer, or the answer of an equal call"],
  settle: ["own", "writes the receipt, settles the limits, updates the cache"],
});

const BAR_PX_MIN = 2; // minimum width of a bar

export const KINDS = /** @type {const} */ ([
  ["own", "gateway"],
  ["wait", "queue"],
  ["server", "deployment"],
  ["failed", "failed attempt"],
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
        h("tbody", null, h("tr", { class: "sub" }, h("th", { scope: "rowgroup", colspan: 4 }, "Attempts")), attempts),
    ),
    h(
      "ul",
      { class: "legend" },
      KINDS.map(([kind, text]) => h("li", null, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text)),
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
  return h("th", { scope: "col", class: "track", "aria-label": "Time axis" }, h("span", { class: "lane" }, marks));
}

/** @param {Phase} phase @param {Axis} axis */
function phaseRow(phase, axis) {
  const [kind, text] = PHASES[phase.name] ?? ["own", ""];
  return row(
    h("span", { class: phase.within_chat ? "within" : "" }, phase.name),
    text,
    kind,
    phase.start_ms,
    phase.end_ms,
    axis,
  );
}

/** @param {Attempt} attempt @param {number} index @param {Axis} axis */
function attemptRow(attempt, index, axis) {
  const bad = isDeploymentFault(attempt.outcome);
  const name = [`${index + 1}. ${attempt.deployment} `, h("span", { class: bad ? "bad" : "dim" }, attempt.outcome)];
  return row(name, "", bad ? "failed" : "server", attempt.start_ms, attempt.end_ms ?? axis.whole, axis);
}

/**
 * @param {any} name @param {string} text @param {string} kind @param {number} start @param {number} end
 * @param {Axis} axis
 */
function row(name, text, kind, start, end, axis) {
  const bar = placed(h("span", { class: `span ${kind}` }), start / axis.whole);
  bar.style.width = percent(Math.max(end - start, 0) / axis.whole);
  const first = axis.first !== null && kind === "server" && axis.first >= start && axis.first <= end;
  return h(
    "tr",
    { title: text || null },
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
