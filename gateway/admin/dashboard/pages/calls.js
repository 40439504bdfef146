// @ts-check
// The calls page: the last calls of all workers, live, and the detail of one of them.

import { DataTable } from "../data_table.js";
import { h, setText, update } from "../dom.js";
import { counted, whole } from "../format.js";
import { lastCalls } from "../sources.js";
import { empty, trouble } from "../widgets.js";
import { callDetail } from "./call.js";
import { drawFilters, FILTERS, LIMITS, matches } from "./call_filters.js";
import { callColumns, CSV_COLUMNS, linkTo, onRow } from "./call_rows.js";

/** @typedef {import("../callstats.js").Call} Call @typedef {import("./call_filters.js").Filters} Filters */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function callsPage({ api, sources, go }) {
  /** @type {Filters} */
  let filters = { show: "", class: "", tenant: "", model: "", server: "", text: "" };
  let opened = "";
  /** @type {Call | null} The opened call, which stays when newer calls displace it from the list. */
  let openedCall = null;
  let limit = LIMITS[1];
  let loadedQuery = "";
  let [seeking, sought] = ["", ""]; // id of the call that is being, and was, searched for
  /** @type {any} The list that is shown while paused. */
  let paused = null;
  const source = sources.calls;

  const troubles = h("div");
  const counts = h("span", { class: "dim", role: "status" });
  const pause = h("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: onPause }, "Pause");
  const filterBar = h("div", { class: "filters" });
  /** @type {DataTable<Call>} */
  const table = new DataTable(
    callColumns(() => filters),
    {
      label: "Calls",
      key: (call) => call.call_id,
      attributes: (call) => ({
        class: call.call_id === opened ? "opened" : null,
        "aria-current": call.call_id === opened ? "true" : null,
        onclick: (/** @type {MouseEvent} */ event) => onRow(event, linkTo(call.call_id, filters)),
      }),
    },
  );
  const none = h("div");
  const list = h("section", { class: "panel calls" }, table.element, none);
  const detail = h("section", { class: "panel detail", "aria-label": "One call" });
  const panes = h("div", { class: "panes" }, list, detail);
  const element = h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "bar" },
      h("h1", null, "Calls"),
      counts,
      h("span", { class: "grow" }),
      table.csvButton("calls", CSV_COLUMNS),
      pause,
    ),
    troubles,
    filterBar,
    panes,
  );

  function onPause() {
    paused = paused ? null : source.value;
    pause.setAttribute("aria-pressed", String(paused !== null));
    setText(pause, paused ? "Resume" : "Pause");
    draw();
  }

  /** @param {Partial<Filters>} change */
  function changeFilters(change) {
    go(["calls", opened].filter(Boolean), { ...filters, ...change });
  }

  /** Requests calls by class and outcome. The gateway stores them separately, so these lists reach further back. */
  function updateQuery() {
    const fields = { limit, class: filters.class, troubled: filters.show !== "" && filters.show !== "answered" };
    if (JSON.stringify(fields) === loadedQuery) return;
    loadedQuery = JSON.stringify(fields);
    source.change(lastCalls(api, fields));
  }

  /** Searches all stored calls for the opened one, which may not be in the list. */
  async function seek() {
    if (seeking === opened) return;
    const id = (seeking = opened);
    for (const troubled of [true, false]) {
      const page = await lastCalls(api, { limit: LIMITS[2], troubled })(undefined).catch(() => null);
      const found = page?.data.find((/** @type {Call} */ call) => call.call_id === id);
      if (found && opened === id) openedCall = found;
    }
    sought = id;
    draw();
  }

  function draw() {
    const page = paused ?? source.value;
    update(troubles, trouble(source, "the calls"), page && workersNote(page.workers));
    if (!page) return;
    /** @type {Call[]} */
    const calls = page.data;
    drawFilters(filterBar, calls, sources.policy.value?.classes ?? [], filters, limit, changeFilters, (count) => {
      limit = count;
      updateQuery();
    });
    const shown = calls.filter((call) => matches(call, filters));
    const note = paused ? ", paused" : "";
    setText(counts, `${whole(shown.length)} of the last ${counted(calls.length, "call")}${note}`);
    table.show(shown);
    update(
      none,
      !shown.length &&
        (calls.length
          ? empty("No matching calls", "Remove a filter, or show more calls.")
          : empty("No calls yet", "Calls appear here when they end.")),
    );
    openedCall = calls.find((call) => call.call_id === opened) ?? (openedCall?.call_id === opened ? openedCall : null);
    if (opened && !openedCall) void seek();
    panes.classList.toggle("opened", opened !== "");
    update(
      detail,
      opened &&
        callDetail(openedCall, {
          opened,
          sought: sought === opened,
          policy: sources.policy.value,
          close: () => go(["calls"], filters),
        }),
    );
  }

  const ends = [source.subscribe(draw), sources.policy.subscribe(draw)];
  return {
    element,
    show({ path, query }) {
      filters = /** @type {Filters} */ (Object.fromEntries(FILTERS.map((filter) => [filter, query.get(filter) ?? ""])));
      const before = opened;
      opened = path[1] ?? "";
      updateQuery();
      draw();
      const { top } = detail.getBoundingClientRect();
      if (opened && opened !== before && (top < 0 || top > innerHeight / 2)) detail.scrollIntoView();
    },
    close: () => ends.forEach((end) => end()),
  };
}

/** A note if not all workers answered. @param {any} workers */
function workersNote({ asked: all, answered }) {
  return (
    answered < all &&
    h(
      "div",
      { class: "trouble" },
      `${answered} of ${counted(all, "worker")} answered: calls of the other workers are missing.`,
    )
  );
}
