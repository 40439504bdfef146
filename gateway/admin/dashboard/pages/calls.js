// @ts-check
// The last calls of all workers, as they come; and one of them, with where its time went.

import { h, keyed, say, update } from "../dom.js";
import { counted, whole } from "../format.js";
import { lastCalls } from "../sources.js";
import { empty, table, trouble } from "../widgets.js";
import { callDetail } from "./call.js";
import { drawFilters, FILTERS, fits, LIMITS } from "./call_filters.js";
import { COLUMNS, row } from "./call_rows.js";

/** @typedef {import("../callstats.js").Call} Call @typedef {import("./call_filters.js").Wanted} Wanted */

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
  const list = h("section", { class: "panel calls" }, table(COLUMNS, rows), none);
  const detail = h("section", { class: "panel detail", "aria-label": "One call" });
  const panes = h("div", { class: "panes" }, list, detail);
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Calls"), counts, h("span", { class: "grow" }), pause),
    troubles,
    filters,
    panes,
  );

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
    keyed(
      rows,
      shown,
      (call) => call.call_id,
      (call) => row(call, call.call_id === opened, wanted),
    );
    update(
      none,
      !shown.length &&
        (calls.length
          ? empty("No call fits", "Take a filter away, or show more calls.")
          : empty("No calls yet", "Make one through the gateway, and it appears here.")),
    );
    kept = calls.find((call) => call.call_id === opened) ?? (kept?.call_id === opened ? kept : null);
    if (opened && !kept) void seek();
    panes.classList.toggle("opened", opened !== "");
    update(
      detail,
      opened &&
        callDetail(kept, {
          opened,
          sought: sought === opened,
          policy: sources.policy.value,
          close: () => go(["calls"], wanted),
        }),
    );
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
  return (
    answered < asked &&
    h(
      "div",
      { class: "trouble" },
      `${answered} of ${counted(asked, "worker")} answered: calls of the others are not shown.`,
    )
  );
}
