// @ts-check
// Combines the usage and cost reports (in OpenAI's format) by day and by tenant, model or key.

/**
 * @typedef {{ start_time: number, results: any[] }} Bucket
 * @typedef {{
 *   name: string, requests: number, input: number, cached: number, output: number,
 *   cost: Map<string, number>, costByDay: Map<string, number[]>, tokensByDay: number[],
 * }} Line  costs by currency; currencies are never added up
 * @typedef {{ days: number[], currencies: string[], lines: Line[] }} Spend  days as seconds since the epoch, UTC
 */

/** The field names of each group in the two reports. */
export const GROUPS = /** @type {const} */ ({
  tenant: { usage: "project_id", costs: "project_id" },
  model: { usage: "model", costs: "line_item" },
  key: { usage: "api_key_id", costs: "api_key_id" },
});
export const NO_NAME = "(none)";

/**
 * @param {Bucket[]} usage @param {Bucket[]} costs of the same days @param {keyof typeof GROUPS} group @returns {Spend}
 */
export function spendOf(usage, costs, group) {
  const days = [...new Set([...usage, ...costs].map((bucket) => bucket.start_time))].sort((a, b) => a - b);
  /** @type {Map<string, Line>} */
  const lines = new Map();
  const lineOf = (/** @type {string | null} */ name) => {
    const key = name ?? NO_NAME;
    const line = lines.get(key) ?? {
      name: key,
      requests: 0,
      input: 0,
      cached: 0,
      output: 0,
      cost: new Map(),
      costByDay: new Map(),
      tokensByDay: days.map(() => 0),
    };
    lines.set(key, line);
    return line;
  };
  for (const { start_time, results } of usage) {
    for (const result of results) {
      const line = lineOf(result[GROUPS[group].usage]);
      line.requests += result.num_model_requests;
      line.input += result.input_tokens;
      line.cached += result.input_cached_tokens;
      line.output += result.output_tokens;
      line.tokensByDay[days.indexOf(start_time)] += result.input_tokens + result.output_tokens;
    }
  }
  for (const { start_time, results } of costs) {
    for (const { amount, ...result } of results) {
      const line = lineOf(result[GROUPS[group].costs]);
      line.cost.set(amount.currency, (line.cost.get(amount.currency) ?? 0) + amount.value);
      const byDay = line.costByDay.get(amount.currency) ?? days.map(() => 0);
      byDay[days.indexOf(start_time)] += amount.value;
      line.costByDay.set(amount.currency, byDay);
    }
  }
  const all = [...lines.values()];
  const currencies = [...new Set(all.flatMap((line) => [...line.cost.keys()]))].sort();
  return {
    days,
    currencies,
    lines: all.sort((a, b) => b.input + b.output - (a.input + a.output) || a.name.localeCompare(b.name)),
  };
}

/**
 * The stacks of a chart: the first lines, and all others as one, so that it stays legible. A line has the same
 * position, and so the same colour, for any `valuesOf`.
 * @param {Line[]} lines @param {number} most @param {(line: Line) => number[]} valuesOf by day
 */
export function stacked(lines, most, valuesOf) {
  const shown = lines.length > most ? lines.slice(0, most - 1) : lines;
  const stacks = shown.map((line) => ({ name: line.name, values: valuesOf(line) }));
  const rest = lines.slice(shown.length).map(valuesOf);
  if (!rest.length) return stacks;
  return [
    ...stacks,
    {
      name: `${rest.length} others`,
      values: rest[0].map((_, day) => rest.reduce((sum, values) => sum + values[day], 0)),
    },
  ];
}
