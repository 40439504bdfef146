import assert from "node:assert/strict";
import test from "node:test";

import { costsByProject, inHierarchy } from "../../../../gateway/admin/dashboard/tenant_tree.js";

const tenant = (name, parent = null) => ({ name, parent });
const paid = (project_id, value, currency = "usd") => ({ project_id, amount: { value, currency } });

test("each tenant stands above those below it, and costs include them", () => {
  const tenants = [tenant("team", "project"), tenant("other"), tenant("project", "acme"), tenant("acme"), tenant("b", "acme")];
  const costs = costsByProject([
    { results: [paid("team", 1), paid("team", 5, "eur"), paid("acme", 2)] },
    { results: [paid("team", 3), paid("other", 7), paid("gone", 9)] },
  ]);
  const rows = inHierarchy(tenants, costs);
  assert.deepEqual(
    rows.map(({ item, depth }) => [item.name, depth]),
    [["acme", 0], ["b", 1], ["project", 1], ["team", 2], ["other", 0]],
  );
  assert.deepEqual(Object.fromEntries(rows[0].costs), { usd: 6, eur: 5 });
  assert.deepEqual(Object.fromEntries(rows[1].costs), {});
  assert.deepEqual(Object.fromEntries(rows[2].costs), { usd: 4, eur: 5 });
});

test("a tenant whose parent is not in the list is a root", () => {
  assert.deepEqual(
    inHierarchy([tenant("a", "unknown")], new Map()).map(({ depth }) => depth),
    [0],
  );
});
