// @ts-check
// The spend page: usage and cost by day, and what is left of the limits.

import { withQuery } from "../api.js";
import { BarChart } from "../bar_chart.js";
import { fill, h, update } from "../dom.js";
import { money, moneyPlaces, share, short, utcDay, whole } from "../format.js";
import { Poll } from "../poll.js";
import { GROUPS, spendOf, stacked } from "../spend.js";
import { empty, number, row, select, table, trouble, withCode } from "../widgets.js";
import { limitsPanel } from "./limits.js";

const EVERY_MS = 60_000; // each poll reads the ledger
const DAY_SECONDS = 86_400;
const DAYS = [7, 14, 30];
const STACKS_MAX = 6;
const ROWS_MAX = 200;

/** @typedef {import("../spend.js").Spend} Spend */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function spendPage({ api, sources, go }) {
  /** @type {keyof typeof GROUPS} */
  let group = "tenant";
  let days = DAYS[0];
  /** @type {BarChart[]} */
  let charts = [];
  let charted = "";
  const source = new Poll(load, EVERY_MS);
  const limits = limitsPanel(api, sources.policy, () => singleCurrency(source.value?.spend.currencies ?? []));

  const choices = h("span", { class: "selects" });
  const troubles = h("div");
  const plots = h("div", { class: "charts" });
  const table = h("section", { class: "panel" });
  const element = h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "bar" },
      h("h1", null, "Spend"),
      h("span", { class: "dim" }, "from receipts, by UTC day"),
      h("span", { class: "grow" }),
      choices,
    ),
    troubles,
    plots,
    table,
    limits.element,
  );

  /** @param {AbortSignal} signal @returns {Promise<{ spend: Spend, group: string, days: number }>} */
  async function load(signal) {
    const [by, back] = [group, days];
    const now = Math.floor(Date.now() / 1000);
    const start = now - (now % DAY_SECONDS) - (back - 1) * DAY_SECONDS;
    const common = { start_time: start, end_time: now + 1, bucket_width: "1d", limit: 31 };
    const usage = await api.get(
      withQuery("/v1/organization/usage/completions", { ...common, group_by: GROUPS[by].usage }),
      signal,
    );
    const costs = await api.get(withQuery("/v1/organization/costs", { ...common, group_by: GROUPS[by].costs }), signal);
    return { spend: spendOf(usage.data, costs.data, by), group: by, days: back };
  }

  function draw() {
    update(
      choices,
      select("By", ["tenant", "model", "key"], group, (by) => go(["spend"], { by, days: String(days) })),
      select(
        "Days",
        DAYS.map((count) => [String(count), `last ${count}`]),
        String(days),
        (count) => go(["spend"], { by: group, days: count }),
      ),
    );
    update(troubles, trouble(source, "the ledger"));
    const found = source.value;
    const current = found && found.group === group && found.days === days;
    element.classList.toggle("waiting", found !== null && !current);
    if (!found) return void update(table, h("p", { class: "dim" }, source.error ? "" : "Reading the ledger …"));
    drawCharts(found.spend);
    limits.draw();
    if (current) update(table, h("h2", null, `By ${group}`), tableOf(found.spend, group));
  }

  /** @param {Spend} spend */
  function drawCharts(spend) {
    const shown = JSON.stringify(spend.currencies);
    if (shown !== charted) {
      for (const chart of charts) chart.close();
      charted = shown;
      charts = [
        ...spend.currencies.map(
          (currency) => new BarChart("Cost", { note: currency.toUpperCase(), unit: (value) => money(value) }),
        ),
        new BarChart("Tokens", { note: "prompts and answers", unit: short }),
      ];
      fill(
        plots,
        charts.map((chart) => chart.element),
      );
    }
    const names = spend.days.map(utcDay);
    spend.currencies.forEach((currency, index) => {
      const zero = spend.days.map(() => 0);
      charts[index].show(
        names,
        stacked(spend.lines, STACKS_MAX, (line) => line.costByDay.get(currency) ?? zero),
      );
    });
    charts[charts.length - 1].show(
      names,
      stacked(spend.lines, STACKS_MAX, (line) => line.tokensByDay),
    );
  }

  const ends = [source.subscribe(draw), limits.open()];
  draw();
  return {
    element,
    show({ query }) {
      const by = query.get("by") ?? "tenant";
      const count = Number(query.get("days") ?? DAYS[0]);
      const [was, were] = [group, days];
      group = by in GROUPS ? /** @type {keyof typeof GROUPS} */ (by) : "tenant";
      days = DAYS.includes(count) ? count : DAYS[0];
      draw();
      if (group !== was || days !== were) source.change(load);
    },
    close() {
      for (const end of ends) end();
      for (const chart of charts) chart.close();
    },
  };
}

/** @param {string[]} currencies */
function singleCurrency(currencies) {
  return currencies.length === 1 ? currencies[0].toUpperCase() : "";
}

/** @param {Spend} spend @param {string} group */
function tableOf({ lines, currencies }, group) {
  if (!lines.length) return empty("No usage in this period", "Calls appear here once they have a receipt.");
  const sum = (/** @type {(line: import("../spend.js").Line) => number} */ of) =>
    lines.reduce((all, line) => all + of(line), 0);
  const most = (/** @type {string} */ currency) => Math.max(...lines.map((line) => line.cost.get(currency) ?? 0));
  const places = currencies.map((currency) => moneyPlaces(most(currency)));
  const all = {
    requests: sum((line) => line.requests),
    input: sum((line) => line.input),
    cached: sum((line) => line.cached),
    output: sum((line) => line.output),
  };
  const cells = (/** @type {any} */ line, /** @type {(currency: string) => number | undefined} */ cost) => [
    number(whole(line.requests)),
    number(whole(line.input)),
    number(share(line.cached, line.input)),
    number(whole(line.output)),
    currencies.map((currency, index) => number(money(cost(currency), currency, places[index]))),
  ];
  const sumOf = (/** @type {string} */ currency) => sum((line) => line.cost.get(currency) ?? 0);
  const lineRow = (/** @type {import("../spend.js").Line} */ line) =>
    row(
      line.name,
      cells(line, (each) => line.cost.get(each)),
    );
  const heads = [
    group[0].toUpperCase() + group.slice(1),
    "#Calls",
    "#Prompt tokens",
    "#Cached",
    "#Output tokens",
    ...currencies.map((currency) => `#Cost in ${currency.toUpperCase()}`),
  ];
  return [
    table(heads, lines.slice(0, ROWS_MAX).map(lineRow), row("total", cells(all, sumOf))),
    lines.length > ROWS_MAX &&
      h(
        "p",
        { class: "dim" },
        withCode(`The first ${ROWS_MAX} of ${whole(lines.length)} rows. \`warmpath usage\` prints all of them.`),
      ),
    !currencies.length &&
      h(
        "p",
        { class: "dim" },
        withCode("These calls are unpriced. Set a `price` for the deployments in the policy."),
      ),
  ];
}
