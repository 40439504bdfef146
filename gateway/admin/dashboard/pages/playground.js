// @ts-check
// The playground: a conversation through the gateway in the name of a key, and the waterfall of each of its calls.

import { withQuery } from "../api.js";
import { promptTokens } from "../callstats.js";
import { fill, h, update } from "../dom.js";
import { counted, duration, share } from "../format.js";
import { lastCalls } from "../sources.js";
import { events } from "../sse.js";
import { waterfall } from "../waterfall.js";
import { keyOptions, select } from "../widgets.js";
import { costOf } from "./call_rows.js";

const SEEK_ATTEMPTS = 10; // to find the call among the last ones, after its answer has ended
const SEEK_PAUSE_MS = 200;
const CALLS_SEARCHED = 50;

/** @typedef {{ role: string, content: string }} Message */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function playgroundPage({ api, sources }) {
  const chosen = { key: "", model: "" };
  /** @type {Message[]} */
  let messages = [];
  /** @type {AbortController | null} The answer that is streaming. */
  let streaming = null;

  const selects = h("span", { class: "selects" });
  const system = h("textarea", { rows: 2, placeholder: "You are a helpful assistant." });
  const maxTokens = h("input", { type: "number", min: 1, max: 100000, value: 256 });
  const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "default" });
  const question = h("textarea", { rows: 3, required: true, placeholder: "Ask something", onkeydown: onKey });
  const send = h("button", { type: "submit" }, "Send");
  const stop = h(
    "button",
    { type: "button", class: "quiet", disabled: true, onclick: () => streaming?.abort() },
    "Stop",
  );
  const anew = h("button", { type: "button", class: "quiet", onclick: onNew }, "New conversation");
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: 0 });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const trace = h("section", { class: "panel", "aria-label": "Trace of the last answer" });
  const form = h(
    "form",
    { class: "ask", onsubmit: onSubmit },
    h("label", { class: "field tall" }, h("span", null, "Message"), question),
    h("div", { class: "buttons" }, anew, stop, send),
  );
  const element = h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "bar" },
      h("h1", null, "Playground"),
      h("span", { class: "dim" }, "Calls are limited and billed like those of the key's clients."),
    ),
    h(
      "section",
      { class: "panel options" },
      selects,
      h("label", { class: "field" }, h("span", null, "Maximum tokens"), maxTokens),
      h("label", { class: "field" }, h("span", null, "Temperature"), temperature),
      h("label", { class: "field tall" }, h("span", null, "System prompt"), system),
    ),
    h("div", { class: "columns" }, h("section", { class: "panel" }, talk, refusal, form), trace),
  );
  fill(
    trace,
    h("h2", null, "Trace"),
    h("p", { class: "dim" }, "After an answer, its phases and attempts are shown here."),
  );

  function draw() {
    const keys = keyOptions(sources.keys.value);
    const models = (sources.policy.value?.models ?? []).map((/** @type {any} */ model) => model.name);
    if (!keys.some(([id]) => id === chosen.key)) chosen.key = keys[0]?.[0] ?? "";
    if (!models.includes(chosen.model)) chosen.model = models[0] ?? "";
    update(
      selects,
      select("Key", keys, chosen.key, (key) => (chosen.key = key)),
      select("Model", models, chosen.model, (model) => (chosen.model = model)),
    );
    send.disabled = streaming !== null || !chosen.key || !chosen.model;
    stop.disabled = streaming === null;
  }

  /** Enter sends, and Shift and Enter begin a new line. @param {KeyboardEvent} event */
  function onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!send.disabled) form.requestSubmit();
  }

  function onNew() {
    streaming?.abort();
    messages = [];
    fill(talk);
    refusal.textContent = "";
    question.focus();
  }

  /** @param {SubmitEvent} event */
  async function onSubmit(event) {
    event.preventDefault();
    const mine = (streaming = new AbortController());
    const asked = { role: "user", content: question.value };
    const answer = h("p", { class: "text" });
    talk.append(said("You", h("p", { class: "text" }, asked.content)), said(chosen.model, answer));
    question.value = "";
    refusal.textContent = "";
    draw();
    try {
      const { text, id } = await streamAnswer([...messages, asked], answer, mine.signal);
      messages.push(asked, { role: "assistant", content: text });
      await showTrace(id);
    } catch (error) {
      refusal.textContent = mine.signal.aborted ? "Stopped." : /** @type {Error} */ (error).message;
      if (!answer.textContent) answer.parentElement?.remove();
    }
    if (streaming === mine) streaming = null;
    draw();
  }

  /** @param {Message[]} conversation @param {Element} place @param {AbortSignal} signal */
  async function streamAnswer(conversation, place, signal) {
    const rules = system.value.trim();
    const body = {
      model: chosen.model,
      messages: [...(rules ? [{ role: "system", content: rules }] : []), ...conversation],
      stream: true,
      max_tokens: Number(maxTokens.value) || 256,
      ...(temperature.value && { temperature: Number(temperature.value) }),
    };
    const reply = await api.stream(withQuery("/admin/playground/chat/completions", { key: chosen.key }), body, signal);
    const id = reply.headers.get("x-request-id") ?? "";
    let text = "";
    for await (const event of events(/** @type {ReadableStream<Uint8Array>} */ (reply.body))) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) place.append(h("span", { class: "dim" }, delta.reasoning_content));
      if (delta.content) {
        text += delta.content;
        place.append(delta.content);
      }
      talk.scrollTop = talk.scrollHeight;
    }
    return { text, id };
  }

  /** Shows the waterfall of a call, once it is among the last calls. @param {string} id */
  async function showTrace(id) {
    for (let attempt = 0; attempt < SEEK_ATTEMPTS; attempt += 1) {
      const page = await lastCalls(api, { limit: CALLS_SEARCHED })(undefined);
      const call = page.data.find((/** @type {any} */ each) => each.call_id === id);
      if (call) return fill(trace, traceOf(call));
      await new Promise((done) => setTimeout(done, SEEK_PAUSE_MS));
    }
    fill(trace, h("h2", null, "Trace"), h("p", null, "The call is not among the last ones any more."));
  }

  const ends = [sources.keys.subscribe(draw), sources.policy.subscribe(draw)];
  draw();
  return {
    element,
    show() {},
    close() {
      streaming?.abort();
      for (const end of ends) end();
    },
  };
}

/** @param {string} who @param {Element} text */
function said(who, text) {
  return h("div", { class: "turn" }, h("strong", null, who), text);
}

/** @param {import("../callstats.js").Call} call */
function traceOf(call) {
  const { usage } = call;
  const tokens = usage
    ? `${counted(promptTokens(usage), "prompt token")} (${share(usage.cache_read, promptTokens(usage))} cached), ` +
      `${counted(usage.output, "output token")}, `
    : "";
  return [
    h("div", { class: "bar" }, h("h2", null, "Trace"), h("span", { class: "grow" }), callLink(call.call_id)),
    h(
      "p",
      { class: "note" },
      `${duration(call.duration_ms)} total, first token after ${duration(call.ttft_ms)}, ${tokens}cost ${costOf(call)}. `,
      `Class ${call.class}, deployment ${call.deployment}: ${call.route_reason}.`,
    ),
    waterfall(call),
  ];
}

/** @param {string} id */
function callLink(id) {
  return h("a", { href: `#/calls/${encodeURIComponent(id)}` }, id);
}
