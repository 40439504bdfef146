import assert from "node:assert/strict";
import test from "node:test";

import { largest, spendOf } from "../../../gateway/dashboard/spend.js";

const used = (project_id, input_tokens, output_tokens) => ({ project_id, input_tokens, input_cached_tokens: input_tokens / 2, output_tokens, num_model_requests: 1 });
const paid = (project_id, value, currency) => ({ project_id, amount: { value, currency } });

test("usage and costs come together by name and by day, and currencies are never added", () => {
  const usage = [{ start_time: 0, results: [used("a", 10, 1), used("b", 100, 10)] }, { start_time: 86400, results: [used("a", 20, 2)] }];
  const costs = [{ start_time: 0, results: [paid("a", 1, "usd"), paid("a", 5, "eur")] }, { start_time: 86400, results: [paid("a", 2, "usd")] }];
  const spend = spendOf(usage, costs, "tenant");
  assert.deepEqual(spend.currencies, ["eur", "usd"]);
  assert.deepEqual(spend.lines.map((line) => line.name), ["b", "a"], "the most tokens first");
  const [, a] = spend.lines;
  assert.deepEqual([a.requests, a.input, a.cached, a.output, a.tokensByDay], [2, 30, 15, 3, [11, 22]]);
  assert.deepEqual([...a.cost], [["usd", 3], ["eur", 5]]);
  assert.deepEqual([a.costByDay.get("usd"), a.costByDay.get("eur")], [[1, 2], [5, 0]]);
});

test("the smaller ones are shown as one", () => {
  const stacks = [1, 5, 0, 3, 2].map((value, index) => ({ name: `n${index}`, values: [value, value] }));
  assert.deepEqual(largest(stacks, 3), [{ name: "n1", values: [5, 5] }, { name: "n3", values: [3, 3] }, { name: "2 others", values: [3, 3] }]);
  assert.deepEqual(largest(stacks, 4).map((stack) => stack.name), ["n1", "n3", "n4", "n0"]);
});
