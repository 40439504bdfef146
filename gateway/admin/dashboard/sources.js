// @ts-check
// The polled sources of data, shared by all pages.

import { withQuery } from "./api.js";
import { Poll } from "./poll.js";
import { parse } from "./prometheus.js";

export const METRICS_MS = 2000; // on the page that shows them
export const METRICS_REST_MS = 5000; // on other pages, which show whether the data is live
const CALLS_MS = 3000;
const CALLS_MAX = 200;

/** @typedef {ReturnType<typeof makeSources>} Sources */

/**
 * Loads the calls that ended last. The result has the path of the request in `asked`.
 * @param {import("./api.js").Api} api @param {{ limit: number, class?: string, troubled?: boolean }} wanted
 */
export function lastCalls(api, wanted) {
  const asked = withQuery("/admin/calls", { ...wanted, troubled: wanted.troubled || null });
  return async (/** @type {AbortSignal | undefined} */ signal) => ({ ...(await api.get(asked, signal)), asked });
}

/** @param {import("./api.js").Api} api */
export function makeSources(api) {
  return {
    metrics: new Poll(async (signal) => parse(await api.text("/admin/metrics", signal), Date.now()), METRICS_REST_MS),
    state: new Poll((signal) => api.get("/admin/state", signal), 5000),
    policy: new Poll((signal) => api.get("/admin/policy", signal), 15_000),
    /** For the calls page. */
    calls: new Poll(lastCalls(api, { limit: CALLS_MAX }), CALLS_MS),
    keys: new Poll((signal) => api.get("/admin/keys", signal), 15_000),
  };
}
