// @ts-check
// The hierarchy of tenants as rows in order, each with the costs of all tenants below it.

/**
 * @template T
 * @typedef {{ item: T, depth: number, costs: Map<string, number> }} Node  `costs` by currency, those below included
 * @typedef {Map<string, Map<string, number>>} Costs  by tenant and currency
 */

/**
 * Rows of a tree: each tenant before those below it, children of one tenant by name. A tenant whose parent is unknown is a root.
 * @template {{ name: string, parent: string | null }} T
 * @param {T[]} tenants @param {Costs} costs @returns {Node<T>[]}
 */
export function inHierarchy(tenants, costs) {
  const names = new Set(tenants.map((tenant) => tenant.name));
  /** @type {Map<string | null, T[]>} */
  const children = new Map();
  for (const tenant of [...tenants].sort((a, b) => (a.name < b.name ? -1 : 1))) {
    const parent = tenant.parent !== null && names.has(tenant.parent) ? tenant.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), tenant]);
  }
  /** @type {Node<T>[]} */
  const rows = [];
  /** @param {T} item @param {number} depth @returns {Map<string, number>} */
  function visit(item, depth) {
    const node = { item, depth, costs: new Map(costs.get(item.name) ?? []) };
    rows.push(node);
    for (const child of children.get(item.name) ?? []) {
      for (const [currency, amount] of visit(child, depth + 1))
        node.costs.set(currency, (node.costs.get(currency) ?? 0) + amount);
    }
    return node.costs;
  }
  for (const root of children.get(null) ?? []) visit(root, 0);
  return rows;
}

/** The costs of all days by project, which is the tenant. @param {any[]} buckets @returns {Costs} */
export function costsByProject(buckets) {
  /** @type {Costs} */
  const sums = new Map();
  for (const { project_id: name, amount } of buckets.flatMap((bucket) => bucket.results)) {
    const of = sums.get(name) ?? new Map();
    sums.set(name, of.set(amount.currency, (of.get(amount.currency) ?? 0) + amount.value));
  }
  return sums;
}
