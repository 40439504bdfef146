// @ts-check
// The batches page: the last batches of all tenants, with their progress. Cancels a batch.

import { withQuery } from "../api.js";
import { meter } from "../charts.js";
import { DataTable } from "../data_table.js";
import { openDialog } from "../dialog.js";
import { h, setText, update } from "../dom.js";
import { counted, NOTHING, share, whole } from "../format.js";
import { Poll } from "../poll.js";
import { empty, name, state, time, trouble } from "../widgets.js";

const EVERY_MS = 5000;
const BATCHES_MAX = 200;
const OPEN = new Set(["validating", "in_progress"]); // statuses in which a batch can be cancelled

/**
 * @typedef {{
 *   id: string, status: string, tenant: string, key_id: string, model?: string | null, endpoint: string,
 *   created_at: number, expires_at: number, errors?: { data: any[] } | null,
 *   request_counts: { total: number, completed: number, failed: number },
 *   usage: { input_tokens: number, output_tokens: number, input_tokens_details: { cached_tokens: number } },
 * } & Record<string, any>} Batch
 */

const LEVELS = /** @type {Record<string, import("../widgets.js").Level>} */ ({
  completed: "good",
  in_progress: "good",
  validating: "good",
  finalizing: "good",
  failed: "bad",
  expired: "warn",
  cancelling: "off",
  cancelled: "off",
});

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function batchesPage({ api }) {
  /** @type {Poll<{ data: Batch[] }>} */
  const source = new Poll((signal) => api.get(withQuery("/admin/batches", { limit: BATCHES_MAX }), signal), EVERY_MS);
  const table = new DataTable(
    columns((batch) => cancelDialog(api, batch, () => source.refresh())),
    { label: "Batches", key: (batch) => batch.id },
  );
  const counts = h("span", { class: "dim", role: "status" });
  const troubles = h("div");
  const none = h("div");
  const element = h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "bar" },
      h("h1", null, "Batches"),
      counts,
      h("span", { class: "grow" }),
      table.csvButton("batches"),
    ),
    troubles,
    h("section", { class: "panel" }, table.element, none),
  );

  function draw() {
    update(troubles, trouble(source, "the batches"));
    if (!source.value) return;
    const batches = source.value.data;
    table.show(batches);
    const open = batches.filter(({ status }) => OPEN.has(status)).length;
    setText(counts, `the last ${counted(batches.length, "batch", "batches")}, ${whole(open)} open`);
    const message = empty("No batches", "Clients create batches with POST /v1/batches or `warmpath batch submit`.");
    update(none, !batches.length && message);
  }

  const end = source.subscribe(draw);
  return { element, show() {}, close: end };
}

/** @param {(batch: Batch) => void} cancel @returns {import("../data_table.js").Column<Batch>[]} */
function columns(cancel) {
  return [
    { name: "Batch", value: (batch) => batch.id, cell: (batch) => h("code", { class: "nowrap" }, batch.id) },
    {
      name: "Status",
      value: (batch) => batch.status,
      cell: (batch) => [state(LEVELS[batch.status] ?? "off", batch.status.replace("_", " ")), errorsOf(batch)],
    },
    {
      name: "Progress",
      value: (batch) => batch.request_counts.completed + batch.request_counts.failed,
      cell: progressOf,
    },
    {
      name: "Failed",
      isNumber: true,
      value: (batch) => batch.request_counts.failed,
      cell: ({ request_counts: { failed } }) => (failed ? h("span", { class: "bad" }, whole(failed)) : "0"),
    },
    { name: "Tenant", value: (batch) => batch.tenant, cell: (batch) => name(batch.tenant) },
    { name: "Key", value: (batch) => batch.key_id, cell: (batch) => name(batch.key_id) },
    { name: "Model", value: (batch) => batch.model, cell: (batch) => name(batch.model ?? null) },
    { name: "Prompt", title: "tokens", isNumber: true, value: promptOf, cell: (batch) => whole(promptOf(batch)) },
    {
      name: "Cached",
      title: "share of the prompt's tokens",
      isNumber: true,
      value: (batch) => batch.usage.input_tokens_details.cached_tokens,
      cell: (batch) => share(batch.usage.input_tokens_details.cached_tokens, promptOf(batch)),
    },
    {
      name: "Output",
      title: "tokens",
      isNumber: true,
      value: (batch) => batch.usage.output_tokens,
      cell: (batch) => whole(batch.usage.output_tokens),
    },
    { name: "Created", value: (batch) => batch.created_at, cell: (batch) => timeOf(batch.created_at) },
    { name: "Expires", value: (batch) => batch.expires_at, cell: (batch) => timeOf(batch.expires_at) },
    {
      name: "Actions",
      cell: (batch) =>
        OPEN.has(batch.status)
          ? h(
              "button",
              {
                type: "button",
                class: "quiet small danger",
                onclick: () => cancel(batch),
                "aria-label": `Cancel ${batch.id}`,
              },
              "Cancel",
            )
          : NOTHING,
    },
  ];
}

/** @param {Batch} batch */
function promptOf(batch) {
  return batch.usage.input_tokens;
}

/** @param {number} seconds since the epoch */
function timeOf(seconds) {
  return h("span", { class: "nowrap" }, time(1000 * seconds));
}

/** @param {Batch} batch */
function progressOf({ request_counts: { total, completed, failed } }) {
  const text = `${whole(completed + failed)} of ${whole(total)}`;
  return h(
    "span",
    { class: "nowrap" },
    meter(completed + failed, total, `${text} lines`, { neutral: true }),
    ` ${text}`,
  );
}

/** @param {Batch} batch */
function errorsOf({ errors }) {
  const [first, ...more] = errors?.data ?? [];
  if (!first) return null;
  const line = first.line ? `line ${first.line}: ` : "";
  return h("span", { class: "second" }, `${line}${first.message}`, more.length > 0 && ` and ${more.length} more`);
}

/** @param {import("../api.js").Api} api @param {Batch} batch @param {() => void} onDone */
function cancelDialog(api, batch, onDone) {
  const warning = "Its answered lines stay in its output file and are billed. The other lines are not run.";
  openDialog(`Cancel ${batch.id}?`, [h("p", null, warning)], "Cancel the batch", true, async () => {
    await api.send("POST", `/admin/batches/${encodeURIComponent(batch.id)}/cancel`, {});
    onDone();
    return null;
  });
}
