import assert from "node:assert/strict";
import test from "node:test";

import { attemptsMs, isDeploymentFault } from "../../../../gateway/admin/dashboard/callstats.js";

test("which attempts failed because of their deployment", () => {
  assert.deepEqual(
    ["connect_error", "timeout", "cut", "malformed", "status_503", "status_429"].filter(
      (each) => !isDeploymentFault(each),
    ),
    [],
  );
  assert.deepEqual(
    ["ok", "client_gone", "hedge_lost", "refused", "status_400", "budget_spent", "out_of_time"].filter(
      isDeploymentFault,
    ),
    [],
  );
});

test("the time of attempts: pauses do not count, and overlapping attempts count once", () => {
  const spans = (...pairs) => pairs.map(([start_ms, end_ms]) => ({ start_ms, end_ms }));
  assert.equal(attemptsMs(spans([0, 10], [30, 40]), 50), 20);
  assert.equal(attemptsMs(spans([5, 30], [0, 10], [6, 9]), 50), 30);
  assert.equal(attemptsMs(spans([10, null]), 50), 40);
});
