// @ts-check
// The last calls of all workers, as they come; and one of them, with where its time went.

import { endOf, promptTokens, speaksAgainst } from "../callstats.js";
import { h, keyed, say, update } from "../dom.js";
import { counted, duration, NOTHING, share, whole } from "../format.js";
import { lastCalls } from "../sources.js";
import { empty, headRow, name, number, select, state, time, trouble } from "../widgets.js";
import { callDetail } from "./call.js";

const LIMITS = [100, 200, 500];
const ENDS = /** @type {Record<string, [import("../widgets.js").Level, string]>} */ ({
  answered: ["good", "answered"],
  refused: ["warn", "refused"],
  limited: ["warn", "limited"],
  failed: ["bad", "failed"],
  left: ["off", "client left"],
});

/** @typedef {import("../callstats.js").Call} Call */

/** What is looked for; empty: anything. */
const FILTERS = /** @type {const} */ (["show", "class", "tenant", "model", "server", "text"]);
/** @typedef {Record<(typeof FILTERS)[number], string>} Wanted */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function callsPage({ api, sources, go }) {
  /** @type {Wanted} */
  let wanted = { show: "", class: "", tenant: "", model: "", server: "", text: "" };
  let opened = "";
  /** @type {Call | null} A call that is looked at stays, also when newer ones have taken its place. */
  let kept = null;
  let limit = LIMITS[1];
  let asked = "";
  let [seeking, sought] = ["", ""]; // the call that is, and was, looked for among all that are kept
  /** @type {any} What is shown while new calls are not let in. */
  let held = null;
  const source = sources.calls;

  const troubles = h("div");
  const counts = h("span", { class: "dim", role: "status" });
  const pause = h("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: onPause }, "Pause");
  const filters = h("div", { class: "filters" });
  const rows = h("tbody");
  const none = h("div");
  const list = h("section", { class: "panel list" }, h("div", { class: "scroll" }, h("table", { class: "rows calls" }, h("thead", null, headRow(COLUMNS)), rows)), none);
  const detail = h("section", { class: "panel detail", "aria-label": "One call" });
  const panes = h("div", { class: "panes" }, list, detail);
  const element = h("div", { class: "page" }, h("div", { class: "bar" }, h("h1", null, "Calls"), counts, h("span", { class: "grow" }), pause), troubles, filters, panes);

  function onPause() {
    held = held ? null : source.value;
    pause.setAttribute("aria-pressed", String(held !== null));
    say(pause, held ? "Go on" : "Pause");
    draw();
  }

  /** @param {Partial<Wanted>} change */
  function want(change) {
    go(["calls", opened].filter(Boolean), { ...wanted, ...change });
  }

  /** Those that went wrong, and those of each class, are kept apart: asking for them reaches further back. */
  function askFor() {
    const asking = { limit, class: wanted.class, troubled: wanted.show !== "" && wanted.show !== "answered" };
    if (JSON.stringify(asking) === asked) return;
    asked = JSON.stringify(asking);
    source.change(lastCalls(api, asking));
  }

  /** A call that is not in the list may still be kept. */
  async function seek() {
    if (seeking === opened) return;
    const id = (seeking = opened);
    for (const troubled of [true, false]) {
      const page = await lastCalls(api, { limit: LIMITS[2], troubled })(undefined).catch(() => null);
      const found = page?.data.find((/** @type {Call} */ call) => call.call_id === id);
      if (found && opened === id) kept = found;
    }
    sought = id;
    draw();
  }

  function draw() {
    const page = held ?? source.value;
    update(troubles, trouble(source, "The calls"), page && workersWords(page.workers));
    if (!page) return;
    /** @type {Call[]} */
    const calls = page.data;
    drawFilters(filters, calls, sources.policy.value?.classes ?? [], wanted, limit, want, (count) => {
      limit = count;
      askFor();
    });
    const shown = calls.filter((call) => fits(call, wanted));
    say(counts, `${whole(shown.length)} of the last ${counted(calls.length, "call")}${held ? ", held" : ""}`);
    keyed(rows, shown, (call) => call.call_id, (call) => row(call, call.call_id === opened, wanted));
    update(none, !shown.length && (calls.length ? empty("No call fits", "Take a filter away, or show more calls.") : empty("No calls yet", "Make one through the gateway, and it appears here.")));
    kept = calls.find((call) => call.call_id === opened) ?? (kept?.call_id === opened ? kept : null);
    if (opened && !kept) void seek();
    panes.classList.toggle("opened", opened !== "");
    update(detail, opened && callDetail(kept, { opened, sought: sought === opened, policy: sources.policy.value, close: () => go(["calls"], wanted) }));
  }

  const ends = [source.subscribe(draw), sources.policy.subscribe(draw)];
  return {
    element,
    show({ path, query }) {
      wanted = /** @type {Wanted} */ (Object.fromEntries(FILTERS.map((filter) => [filter, query.get(filter) ?? ""])));
      const before = opened;
      opened = path[1] ?? "";
      askFor();
      draw();
      const { top } = detail.getBoundingClientRect();
      if (opened && opened !== before && (top < 0 || top > innerHeight / 2)) detail.scrollIntoView();
    },
    close: () => ends.forEach((end) => end()),
  };
}

/** @param {{ asked: number, answered: number }} workers */
function workersWords({ asked, answered }) {
  return answered < asked && h("div", { class: "trouble" }, `${answered} of ${counted(asked, "worker")} answered: calls of the others are not shown.`);
}

/** @type {(string | [string, string])[]} */
const COLUMNS = [
  "Time",
  "Ended",
  "Model",
  "Tenant",
  "Key",
  "Class",
  "Server",
  ["#Duration", "from the request's arrival to the end of its reply"],
  ["#First token", "from the request's arrival"],
  ["#Queue", "waited for its turn"],
  ["#Prompt", "tokens"],
  ["#Cached", "share of the prompt's tokens"],
  ["#Output", "tokens"],
];

/** @param {Call} call @param {boolean} isOpened @param {Wanted} wanted */
function row(call, isOpened, wanted) {
  const [level, words] = ENDS[endOf(call)];
  const why = call.error_code ?? (call.outcome && call.outcome !== "complete" && call.outcome !== "client_gone" ? call.outcome : "");
  const tried = call.attempts.length;
  const prompt = call.usage && promptTokens(call.usage);
  const link = linkTo(call.call_id, wanted);
  return h(
    "tr",
    { class: isOpened ? "opened" : null, "aria-current": isOpened ? "true" : null, onclick: (/** @type {MouseEvent} */ event) => onRow(event, link) },
    h("td", { class: "nowrap" }, h("a", { href: link, "aria-label": `Call ${call.call_id}` }, time(call.time))),
    h("td", null, state(level, `${words} ${call.status}`), why && h("span", { class: "second" }, why)),
    h("td", null, name(call.model), call.operation !== "chat/completions" && h("span", { class: "second" }, call.operation ?? call.path)),
    h("td", null, name(call.tenant)),
    h("td", null, name(call.key_id)),
    h("td", null, name(call.class)),
    h("td", null, name(serverOf(call)), tried > 1 && h("span", { class: "second" }, `${tried} tried`)),
    number(duration(call.duration_ms)),
    number(duration(call.ttft_ms)),
    number(duration(call.queued_ms)),
    number(whole(prompt)),
    number(call.usage ? share(call.usage.cache_read, prompt) : NOTHING),
    number(whole(call.usage?.output)),
  );
}

/** @param {Call} call */
function serverOf(call) {
  if (call.deployment !== null) return call.deployment;
  return call.cache === "hit" || call.cache === "shared" ? `response cache: ${call.cache}` : null;
}

/** A click anywhere in a row opens its call, unless text is being selected. @param {MouseEvent} event @param {string} link */
function onRow(event, link) {
  const onLink = event.target instanceof Element && event.target.closest("a, button");
  if (!onLink && !getSelection()?.toString()) location.hash = link;
}

/** @param {string} id @param {Wanted} wanted */
function linkTo(id, wanted) {
  const query = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value)).toString();
  return `#/calls/${encodeURIComponent(id)}${query && `?${query}`}`;
}

/** @param {Call} call @param {Wanted} wanted */
function fits(call, wanted) {
  if (wanted.show === "problems" && endOf(call) === "answered" && !call.attempts.some((each) => speaksAgainst(each.outcome))) return false;
  if (wanted.show && wanted.show !== "problems" && endOf(call) !== wanted.show) return false;
  if (wanted.class && call.class !== wanted.class) return false;
  if (wanted.tenant && call.tenant !== wanted.tenant) return false;
  if (wanted.model && call.model !== wanted.model) return false;
  const servers = [call.deployment, ...call.attempts.map((each) => each.deployment)];
  if (wanted.server && !servers.includes(wanted.server)) return false;
  if (!wanted.text) return true;
  const said = [call.call_id, call.trace_id, call.event_id, call.key_id, call.tenant, call.model, call.error_code, call.path, ...servers];
  return said.some((each) => each?.toLowerCase().includes(wanted.text.toLowerCase()));
}

/**
 * @param {Element} place @param {Call[]} calls @param {string[]} classes @param {Wanted} wanted @param {number} limit
 * @param {(change: Partial<Wanted>) => void} want @param {(limit: number) => void} onLimit
 */
function drawFilters(place, calls, classes, wanted, limit, want, onLimit) {
  if (!place.firstChild) {
    const box = h("input", { type: "search", value: wanted.text, placeholder: "id, key, error …", oninput: () => want({ text: box.value }) });
    place.append(h("span", { class: "selects" }), h("label", { class: "field" }, h("span", null, "Find"), box));
  }
  const ends = /** @type {[string, string][]} */ ([["", "all"], ["problems", "with problems"], ...Object.entries(ENDS).map(([end, [, words]]) => [end, words])]);
  const names = (/** @type {(string | null)[]} */ found, /** @type {string} */ chosen) =>
    /** @type {[string, string][]} */ ([["", "all"], ...[...new Set([...found, chosen])].filter(Boolean).sort().map((each) => [each, each])]);
  update(
    /** @type {Element} */ (place.firstElementChild),
    select("Ended", ends, wanted.show, (show) => want({ show })),
    select("Class", names(classes, wanted.class), wanted.class, (each) => want({ class: each })),
    select("Tenant", names(calls.map((call) => call.tenant), wanted.tenant), wanted.tenant, (tenant) => want({ tenant })),
    select("Model", names(calls.map((call) => call.model), wanted.model), wanted.model, (model) => want({ model })),
    select("Server", names(calls.flatMap((call) => call.attempts.map((each) => each.deployment)), wanted.server), wanted.server, (server) => want({ server })),
    select("Show", LIMITS.map((each) => [String(each), `last ${each}`]), String(limit), (count) => onLimit(Number(count))),
  );
}
