// @ts-check
// What single calls tell of servers, which the metrics do not count by server.

import { kindOf } from "./history.js";

/**
 * A call as `GET /admin/calls` has it.
 * @typedef {{
 *   call_id: string, trace_id: string, time: string, path: string, operation: string | null, status: number,
 *   outcome: string | null, error_code: string | null, tenant: string | null, key_id: string | null,
 *   model: string | null, class: string | null, cache: string, deployment: string | null, route_reason: string | null,
 *   event_id: string | null, finish_reasons: string[], duration_ms: number, own_ms: number, queued_ms: number | null,
 *   ttft_ms: number | null, usage: Usage | null, predicted_cached_tokens: number, phases: any[], attempts: any[],
 *   worker: number,
 * }} Call
 * @typedef {{
 *   input_uncached: number, cache_read: number, cache_write: number, output: number, reasoning: number,
 * }} Usage
 */

const FAULTS = new Set(["connect_error", "timeout", "cut", "malformed", "upstream_cut"]);

/**
 * Whether an attempt speaks against its server. A refused request and a client that leaves do not.
 * @param {string} outcome
 */
export function speaksAgainst(outcome) {
  return FAULTS.has(outcome) || /^status_(429|5)/.test(outcome);
}

/** @param {Usage} usage */
export function promptTokens(usage) {
  return usage.input_uncached + usage.cache_read + usage.cache_write;
}

/**
 * For how long at least one attempt was under way; races overlap.
 * @param {{ start_ms: number, end_ms: number | null }[]} attempts @param {number} end of those that have none
 */
export function coveredMs(attempts, end) {
  let covered = 0;
  let until = -Infinity;
  for (const { start_ms, end_ms } of [...attempts].sort((a, b) => a.start_ms - b.start_ms)) {
    const last = end_ms ?? end;
    covered += Math.max(0, last - Math.max(start_ms, until));
    until = Math.max(until, last);
  }
  return covered;
}

/** How a call ended, as `kindOf` tells it. @param {Call} call */
export function endOf(call) {
  return kindOf(call.status, call.outcome);
}

/**
 * The smallest value that so large a share of them is not above; null of none.
 * @param {number} q @param {number[]} values
 */
export function percentile(q, values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)] ?? null;
}

/**
 * @typedef {{
 *   tries: number, failed: Map<string, number>, ttft: number[], answers: number,
 *   prompt: number, cached: number, output: number,
 * }} ServerStats  `failed` by outcome; `ttft` in ms from the attempt to the first chunk
 */

/**
 * By server, of the calls that began in the last `ms`. Where `full`, older ones have been left out of the list, so that
 * it may not reach back so far: `seconds` says how far it does.
 * @param {Call[]} calls newest first @param {boolean} full @param {number} now @param {number} ms
 */
export function ofServers(calls, full, now, ms) {
  const oldest = calls.length ? Date.parse(calls[calls.length - 1].time) : now;
  const since = full ? Math.max(oldest, now - ms) : now - ms;
  const looked = calls.filter((call) => Date.parse(call.time) >= since);
  /** @type {Map<string, ServerStats>} */
  const servers = new Map();
  for (const call of looked) {
    for (const attempt of call.attempts) {
      const stats = statsOf(servers, attempt.deployment);
      stats.tries += 1;
      if (speaksAgainst(attempt.outcome))
        stats.failed.set(attempt.outcome, (stats.failed.get(attempt.outcome) ?? 0) + 1);
    }
    if (call.deployment !== null && call.attempts.length) learn(statsOf(servers, call.deployment), call);
  }
  return { servers, calls: looked.length, seconds: Math.max((now - since) / 1000, 1) };
}

/** @param {Map<string, ServerStats>} servers @param {string} name */
function statsOf(servers, name) {
  const found = servers.get(name) ?? {
    tries: 0,
    failed: new Map(),
    ttft: [],
    answers: 0,
    prompt: 0,
    cached: 0,
    output: 0,
  };
  servers.set(name, found);
  return found;
}

/** @param {ServerStats} stats @param {Call} call */
function learn(stats, call) {
  stats.answers += 1;
  const asked = call.attempts.findLast((attempt) => attempt.deployment === call.deployment);
  if (call.ttft_ms !== null && asked) stats.ttft.push(Math.max(call.ttft_ms - asked.start_ms, 0));
  if (!call.usage) return;
  stats.prompt += promptTokens(call.usage);
  stats.cached += call.usage.cache_read;
  stats.output += call.usage.output;
}
