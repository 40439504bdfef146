import assert from "node:assert/strict";
import test from "node:test";

import { spendOf, stacked } from "../../../../gateway/admin/dashboard/spend.js";

const used = (project_id, input_tokens, output_tokens) => ({
  project_id,
  input_tokens,
  input_cached_tokens: input_tokens / 2,
  output_tokens,
  num_model_requests: 1,
});
const paid = (project_id, value, currency) => ({ project_id, amount: { value, currency } });

test("usage and costs are combined by name and day, and currencies are not added up", () => {
  const usage = [
    { start_time: 0, results: [used("a", 10, 1), used("b", 100, 10)] },
    { start_time: 86400, results: [used("a", 20, 2)] },
  ];
  const costs = [
    { start_time: 0, results: [paid("a", 1, "usd"), paid("a", 5, "eur")] },
    { start_time: 86400, results: [paid("a", 2, "usd")] },
  ];
  const spend = spendOf(usage, costs, "tenant");
  assert.deepEqual(spend.currencies, ["eur", "usd"]);
  assert.deepEqual(
    spend.lines.map((line) => line.name),
    ["b", "a"],
    "the most tokens first",
  );
  const [, a] = spend.lines;
  assert.deepEqual([a.requests, a.input, a.cached, a.output, a.tokensByDay], [2, 30, 15, 3, [11, 22]]);
  assert.deepEqual(
    [...a.cost],
    [
      ["usd", 3],
      ["eur", 5],
    ],
  );
  assert.deepEqual(
    [a.costByDay.get("usd"), a.costByDay.get("eur")],
    [
      [1, 2],
      [5, 0],
    ],
  );
});

test("later lines are stacked as one, and the first ones keep their positions", () => {
  const lines = [5, 3, 0, 1].map((value, index) => ({ name: `n${index}`, tokensByDay: [value, 2 * value] }));
  const names = (most) => stacked(lines, most, (line) => line.tokensByDay).map((stack) => stack.name);
  assert.deepEqual(stacked(lines, 3, (line) => line.tokensByDay)[2], { name: "2 others", values: [1, 2] });
  assert.deepEqual(
    [names(3), names(4)],
    [
      ["n0", "n1", "2 others"],
      ["n0", "n1", "n2", "n3"],
    ],
  );
});
