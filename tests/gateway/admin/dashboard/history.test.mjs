import assert from "node:assert/strict";
import test from "node:test";

import { historyPath, largest, perSecond, sumOf } from "../../../../gateway/admin/dashboard/history.js";
import { historyRows } from "../../../../gateway/admin/dashboard/pages/history_charts.js";

const point = (fields) => ({
  at: 1795694540,
  seconds: 10,
  results: {},
  errors: {},
  ttft_ms: { p50: null, p95: null, p99: null },
  hit_rate: null,
  prompt_tokens: 0,
  cached_tokens: 0,
  output_tokens: 0,
  cost: {},
  queued: 0,
  in_flight: 0,
  storage_timeouts: 0,
  ...fields,
});

test("the path names the range and at most one group, whatever its name contains", () => {
  assert.equal(historyPath({ span: "1h", of: "" }), "/admin/history?span=1h");
  assert.equal(historyPath({ span: "7d", of: "model:a:b&c" }), "/admin/history?span=7d&model=a%3Ab%26c");
});

test("rates are those of the time in which the gateway was running", () => {
  assert.equal(perSecond(5, point({ seconds: 2 })), 2.5);
  assert.equal(perSecond(5, point({ seconds: 0 })), null);
  assert.equal(sumOf({ answered: 2, failed: 1 }), 3);
});

test("the largest causes over all points", () => {
  const points = [point({ errors: { a: 1, b: 2 } }), point({ errors: { a: 5, c: 1 } })];
  assert.deepEqual(
    largest(points, ({ errors }) => errors, 2),
    ["a", "b"],
  );
});

test("the history as rows has a column for each currency", () => {
  const points = [point({ results: { answered: 4 }, cost: { USD: 0.5 } }), point({ cost: { EUR: 2 } })];
  const [heads, first, second] = historyRows({ points });
  assert.equal(first.length, heads.length);
  assert.deepEqual([first[heads.indexOf("answered")], first[heads.indexOf("cost_USD")]], [4, 0.5]);
  assert.deepEqual([second[heads.indexOf("answered")], second[heads.indexOf("cost_EUR")]], [0, 2]);
  assert.equal(first[0], "2026-11-26T12:02:20.000Z");
});
