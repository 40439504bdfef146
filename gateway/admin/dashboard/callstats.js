// @ts-check
// Statistics of deployments from single calls, for values that the metrics do not have by deployment.

import { outcomeKind } from "./history.js";

/**
 * A call in the format of `GET /admin/calls`.
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

/** The kind of a call's outcome. @param {Call} call */
export function outcomeOf(call) {
  return outcomeKind(call.status, call.outcome);
}

/**
 * The smallest value that is not below the share `q` of all values. Null without values.
 * @param {number} q @param {number[]} values
 */
export function percentile(q, values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)] ?? null;
}

/**
 * @typedef {{
 *   attempts: number, failed: Map<string, number>, ttft: number[], answers: number,
 *   prompt: number, cached: number, output: number,
 * }} DeploymentStats  `failed` by outcome; `ttft` in ms from the attempt to the first chunk
 */

/**
 * Statistics by deployment of the calls that began in the last `ms`. If the list is `full`, it may not contain all of
 * them; `seconds` is the time that it covers.
 * @param {Call[]} calls newest first @param {boolean} full @param {number} now @param {number} ms
 */
export function deploymentStats(calls, full, now, ms) {
  const oldest = calls.length ? Date.parse(calls[calls.length - 1].time) : now;
  const since = full ? Math.max(oldest, now - ms) : now - ms;
  const counted = calls.filter((call) => Date.parse(call.time) >= since);
  /** @type {Map<string, DeploymentStats>} */
  const deployments = new Map();
  for (const call of counted) {
    for (const attempt of call.attempts) {
      const stats = statsOf(deployments, attempt.deployment);
      stats.attempts += 1;
      if (isDeploymentFault(attempt.outcome))
        stats.failed.set(attempt.outcome, (stats.failed.get(attempt.outcome) ?? 0) + 1);
    }
    if (call.deployment !== null && call.attempts.length) addAnswer(statsOf(deployments, call.deployment), call);
  }
  return { deployments, calls: counted.length, seconds: Math.max((now - since) / 1000, 1) };
}

/** @param {Map<string, DeploymentStats>} deployments @param {string} name */
function statsOf(deployments, name) {
  const found = deployments.get(name) ?? {
    attempts: 0,
    failed: new Map(),
    ttft: [],
    answers: 0,
    prompt: 0,
    cached: 0,
    output: 0,
  };
  deployments.set(name, found);
  return found;
}

/** @param {DeploymentStats} stats @param {Call} call */
function addAnswer(stats, call) {
  stats.answers += 1;
  const attempt = call.attempts.findLast((each) => each.deployment === call.deployment);
  if (call.ttft_ms !== null && attempt) stats.ttft.push(Math.max(call.ttft_ms - attempt.start_ms, 0));
  if (!call.usage) return;
  stats.prompt += promptTokens(call.usage);
  stats.cached += call.usage.cache_read;
  stats.output += call.usage.output;
}
