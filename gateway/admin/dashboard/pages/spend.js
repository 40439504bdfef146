// @ts-check
// The spend page: usage and cost by day, and what is left of the limits.

import { withQuery } from "../api.js";
import { BarChart } from "../bar_chart.js";
import { fill, h, update } from "../dom.js";
import { money, short, utcDay } from "../format.js";
import { Poll } from "../poll.js";
import { GROUPS, spendOf, stacked } from "../spend.js";
import { select, trouble } from "../widgets.js";
import { limitsPanel } from "./limits.js";
import { spendPanel } from "./spend_table.js";

const EVERY_MS = 60_000; // each poll reads the ledger
const DAY_SECONDS = 86_400;
const DAYS = [7, 14, 30];
const STACKS_MAX = 6;

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
  const lines = spendPanel();
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
    lines.element,
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
    if (!found) return;
    drawCharts(found.spend);
    limits.draw();
    if (current) lines.show(found.spend, group, days, limits.budgets());
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

  const ends = [source.subscribe(draw), limits.open(draw)];
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
