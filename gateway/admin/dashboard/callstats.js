// @ts-check
// What single calls tell: faults of deployments, prompt tokens, the time of attempts.

/**
 * A call in the format of `GET /admin/calls`.
 * @typedef {{
 *   call_id: string, trace_id: string, time: string, path: string, operation: string | null, status: number,
 *   outcome: string | null, result: Result, error_code: string | null, tenant: string | null, key_id: string | null,
 *   model: string | null, class: string | null, cache: string, deployment: string | null, route_reason: string | null,
 *   event_id: string | null, finish_reasons: string[], duration_ms: number, own_ms: number, queued_ms: number | null,
 *   ttft_ms: number | null, usage: Usage | null, cost: string | null, currency: string | null, predicted_cached_tokens: number, phases: any[], attempts: any[],
 *   worker: number,
 * }} Call
 * @typedef {"answered" | "rejected" | "limited" | "failed" | "disconnected"} Result
 * @typedef {{
 *   input_uncached: number, cache_read: number, cache_write: number, output: number, reasoning: number,
 * }} Usage
 */

const FAULTS = new Set(["connect_error", "timeout", "cut", "malformed", "upstream_cut"]);

/**
 * True if an attempt failed because of its deployment. A rejected request or a disconnected client does not count.
 * @param {string} outcome
 */
export function isDeploymentFault(outcome) {
  return FAULTS.has(outcome) || /^status_(429|5)/.test(outcome);
}

/** @param {Usage} usage */
export function promptTokens(usage) {
  return usage.input_uncached + usage.cache_read + usage.cache_write;
}

/**
 * Time during which at least one attempt was in flight. Hedged attempts overlap and count once.
 * @param {{ start_ms: number, end_ms: number | null }[]} attempts @param {number} end of attempts without an end
 */
export function attemptsMs(attempts, end) {
  let covered = 0;
  let until = -Infinity;
  for (const { start_ms, end_ms } of [...attempts].sort((a, b) => a.start_ms - b.start_ms)) {
    const last = end_ms ?? end;
    covered += Math.max(0, last - Math.max(start_ms, until));
    until = Math.max(until, last);
  }
  return covered;
}
