import assert from "node:assert/strict";
import test from "node:test";

import { attemptsMs, deploymentStats, percentile, isDeploymentFault } from "../../../../gateway/admin/dashboard/callstats.js";

const NOW = Date.parse("2026-11-23T12:00:00Z");
const call = (secondsAgo, fields) => ({
  time: new Date(NOW - 1000 * secondsAgo).toISOString(),
  status: 200,
  outcome: "complete",
  attempts: [],
  deployment: null,
  ttft_ms: null,
  usage: null,
  ...fields,
});
const usage = { input_uncached: 30, cache_read: 60, cache_write: 10, output: 20, reasoning: 0 };

test("which attempts failed because of their deployment", () => {
  assert.deepEqual(
    ["connect_error", "timeout", "cut", "malformed", "status_503", "status_429"].filter((each) => !isDeploymentFault(each)),
    [],
  );
  assert.deepEqual(
    ["ok", "client_gone", "hedge_lost", "refused", "status_400", "budget_spent", "out_of_time"].filter(isDeploymentFault),
    [],
  );
});

test("percentiles of few values are values", () => {
  assert.equal(percentile(0.5, []), null);
  assert.equal(percentile(0.5, [3, 1, 2]), 2);
  assert.equal(percentile(0.95, [3, 1, 2]), 3);
});

test("statistics of a deployment come from its own attempts", () => {
  const calls = [
    call(1, {
      deployment: "b",
      ttft_ms: 90,
      usage,
      attempts: [
        { deployment: "a", outcome: "connect_error", start_ms: 1, end_ms: 2 },
        { deployment: "b", outcome: "ok", start_ms: 50, end_ms: 99 },
      ],
    }),
    call(2, { cache: "hit" }),
    call(400, {
      deployment: "a",
      ttft_ms: 10,
      usage,
      attempts: [{ deployment: "a", outcome: "ok", start_ms: 1, end_ms: 9 }],
    }),
  ];
  const stats = deploymentStats(calls, false, NOW, 300_000);
  assert.equal(stats.calls, 2);
  assert.equal(stats.seconds, 300);
  const [a, b] = [stats.deployments.get("a"), stats.deployments.get("b")];
  assert.deepEqual([a.attempts, [...a.failed], a.answers], [1, [["connect_error", 1]], 0]);
  assert.deepEqual(
    [b.attempts, b.failed.size, b.answers, b.ttft, b.prompt, b.cached, b.output],
    [1, 0, 1, [40], 100, 60, 20],
  );
});

test("a truncated list reports the time that it covers", () => {
  assert.equal(deploymentStats([call(1, {}), call(20, {})], true, NOW, 300_000).seconds, 20);
});

test("the time of attempts: pauses do not count, and overlapping attempts count once", () => {
  const spans = (...pairs) => pairs.map(([start_ms, end_ms]) => ({ start_ms, end_ms }));
  assert.equal(attemptsMs(spans([0, 10], [30, 40]), 50), 20);
  assert.equal(attemptsMs(spans([5, 30], [0, 10], [6, 9]), 50), 30);
  assert.equal(attemptsMs(spans([10, null]), 50), 40);
});
