// @ts-check
// The first page: figures of the last minute, charts of a time range, the deployments, models and classes, the queues,
// and the gateway's health.

import { downloadCsv } from "../csv.js";
import { h, update } from "../dom.js";
import { duration, share, short, whole } from "../format.js";
import { historyMs, historyPath, historyPoll, loadHistory, perSecond, SPANS, sumOf } from "../history.js";
import { total, totals } from "../prometheus.js";
import { METRICS_MS, METRICS_REST_MS } from "../sources.js";
import { groupedSelect, select, trouble } from "../widgets.js";
import { deploymentsPanel } from "./deployments.js";
import { groupPanel } from "./groups.js";
import { gatewayPanel, queuePanel } from "./health.js";
import { historyCharts, historyRows } from "./history_charts.js";

const SHORT_SECONDS = 900; // of history, which the shortest range shows

/** @typedef {import("../history.js").History} History */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function nowPage({ api, sources, go }) {
  const wanted = { span: "1h", of: "" };
  let isChosen = false; // the range, by the user
  const source = historyPoll(api, wanted);
  const charts = historyCharts();
  const deployments = deploymentsPanel();
  const [models, classes] = [groupPanel("Models", "model"), groupPanel("Latency classes", "class")];
  const choices = h("span", { class: "selects" });
  const figures = h("dl", { class: "figures", "aria-label": "The last minute" });
  const troubles = h("div");
  const queues = h("section", { class: "panel" });
  const gateway = h("section", { class: "panel" });
  const csv = h("button", { type: "button", class: "quiet small", onclick: onCsv }, "CSV");
  csv.setAttribute("aria-label", "Download the history as CSV");
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Now"), h("span", { class: "grow" }), choices, csv),
    troubles,
    figures,
    h("div", { class: "charts" }, charts.elements),
    deployments.element,
    h("div", { class: "columns" }, models.element, classes.element),
    h("div", { class: "columns" }, queues, gateway),
  );

  function onCsv() {
    if (source.value) downloadCsv(`history-${wanted.span}`, historyRows(source.value));
  }

  function draw() {
    const { policy, state, metrics } = sources;
    update(troubles, trouble(source, "the history"), trouble(policy, "the policy"));
    drawChoices();
    const history = source.value;
    if (history) shorten(history);
    const current = history?.path === historyPath(wanted);
    element.classList.toggle("waiting", history !== null && !current);
    update(figures, figuresOf(history, metrics.value));
    if (history) charts.show(history);
    deployments.show({
      metrics: metrics.value,
      policy: policy.value,
      history,
      unavailable: state.value?.unavailable ?? {},
    });
    models.show(history);
    classes.show(history);
    queuePanel(queues, metrics.value);
    gatewayPanel(gateway, { metrics: metrics.value, policy: policy.value, state: state.value, history });
  }

  /** Begins with a short range if the gateway has just started, so that the charts are not empty. @param {History} history */
  function shorten(history) {
    const [first] = history.points;
    if (isChosen || wanted.span === SPANS[0][0] || !first || history.to - first.at > SHORT_SECONDS) return;
    wanted.span = SPANS[0][0];
    source.change(loadHistory(api, { ...wanted }), historyMs(wanted.span));
  }

  function drawChoices() {
    const names = (/** @type {"class" | "model" | "deployment"} */ by) => Object.keys(source.value?.by[by] ?? {});
    const groups = /** @type {const} */ (["class", "model", "deployment"]).map(
      (by) => /** @type {[string, [string, string][]]} */ ([by, names(by).map((name) => [`${by}:${name}`, name])]),
    );
    update(
      choices,
      groupedSelect("Calls of", "all", groups, wanted.of, (of) => go(["now"], { ...wanted, of })),
      select("Range", SPANS, wanted.span, (span) => go(["now"], { ...wanted, span })),
    );
  }

  sources.metrics.refresh(METRICS_MS);
  const ends = [source, sources.metrics, sources.policy, sources.state].map((each) => each.subscribe(draw));
  draw();
  return {
    element,
    show({ query }) {
      const before = historyPath(wanted);
      isChosen = query.has("span");
      if (isChosen) wanted.span = SPANS.find(([name]) => name === query.get("span"))?.[0] ?? "1h";
      wanted.of = query.get("of") ?? "";
      if (historyPath(wanted) !== before) source.change(loadHistory(api, { ...wanted }), historyMs(wanted.span));
      draw();
    },
    close() {
      for (const end of ends) end();
      charts.close();
      sources.metrics.refresh(METRICS_REST_MS);
    },
  };
}

/**
 * @param {History | null} history @param {import("../prometheus.js").Snapshot | null} metrics
 */
function figuresOf(history, metrics) {
  const last = history?.last_minute ?? null;
  const requests = last ? sumOf(last.results) : null;
  const failed = last?.results.failed ?? 0;
  const queued = metrics
    ? [...totals(metrics, "warmpath_queue_depth", "class").values()].reduce((a, b) => a + b, 0)
    : null;
  const rate = (/** @type {number | null} */ count) => (last && count !== null ? short(perSecond(count, last)) : "–");
  return [
    figure("Requests", `${rate(requests)}/s`, "in the last minute"),
    figure(
      "Failed",
      share(failed, requests),
      `${whole(failed)} of ${whole(requests)}: 5xx, timeouts, cut streams`,
      failed > 0,
    ),
    figure("First token p50", duration(last?.ttft_ms.p50), "from the request's arrival"),
    figure("First token p99", duration(last?.ttft_ms.p99), "from the request's arrival"),
    figure(
      "Prefix cache hits",
      share(last?.cached_tokens, last?.prompt_tokens),
      "share of prompt tokens read from a prefix cache",
    ),
    figure("Output", `${rate(last?.output_tokens ?? null)} tok/s`, "generated tokens"),
    figure("In flight", whole(metrics && total(metrics, "warmpath_inflight")), "requests in flight, of all calls"),
    figure("Queued", whole(queued), "queued calls, of all classes", (queued ?? 0) > 0),
  ];
}

/**
 * @param {string} name @param {string} value @param {string} title
 * @param {boolean} [stands] true to highlight the value
 */
function figure(name, value, title, stands = false) {
  return h("div", { title }, h("dt", null, name), h("dd", { class: stands ? "stands" : null }, value));
}
