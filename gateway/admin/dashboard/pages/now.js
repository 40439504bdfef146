// @ts-check
// The first page: figures of the last minute, four charts, the deployments, the queues, and the gateway's health.

import { h, update } from "../dom.js";
import { duration, roundDuration, share, short, whole } from "../format.js";
import { HISTORY_MS, sliding, sumOf, summed } from "../history.js";
import { LineChart } from "../line_chart.js";
import { quantile } from "../prometheus.js";
import { METRICS_MS, METRICS_REST_MS } from "../sources.js";
import { trouble } from "../widgets.js";
import { deploymentsTable } from "./deployments.js";
import { gatewayPanel, queuePanel } from "./health.js";

const MINUTE_MS = 60_000;
const SMOOTH_MS = 10_000; // averaging window of the charts

/** @typedef {import("../history.js").Point} Point @typedef {import("../history.js").Sums} Sums */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function nowPage({ api, sources }) {
  const charts = makeCharts();
  const figures = h("dl", { class: "figures" });
  const troubles = h("div");
  const deployments = h("section", { class: "panel" });
  const queues = h("section", { class: "panel" });
  const gateway = h("section", { class: "panel" });
  const element = h(
    "div",
    { class: "page" },
    h("h1", { class: "hidden" }, "Now"),
    troubles,
    figures,
    h(
      "div",
      { class: "charts" },
      charts.map(({ chart }) => chart.element),
    ),
    deployments,
    h("div", { class: "columns" }, queues, gateway),
  );

  function draw() {
    const { policy, recent, state, history } = sources;
    update(troubles, trouble(recent, "the last calls"), trouble(policy, "the policy"));
    update(figures, figuresOf(history));
    for (const { chart, lines } of charts) chart.show(lines(history.points), history.latest?.at ?? Date.now());
    const now = api.at(recent.at ?? Date.now());
    deploymentsTable(deployments, {
      history,
      policy: policy.value,
      recent: recent.value,
      unavailable: state.value?.unavailable ?? {},
      now,
    });
    queuePanel(queues, history);
    gatewayPanel(gateway, { history, policy: policy.value, state: state.value });
  }

  sources.metrics.refresh(METRICS_MS);
  const ends = [sources.metrics, sources.policy, sources.recent, sources.state].map((source) => source.subscribe(draw));
  draw();
  return {
    element,
    show() {},
    close() {
      for (const end of ends) end();
      for (const { chart } of charts) chart.close();
      sources.metrics.refresh(METRICS_REST_MS);
    },
  };
}

/** @param {import("../history.js").History} history */
function figuresOf(history) {
  const sums = summed(history.last(MINUTE_MS));
  const [latest] = history.points.slice(-1);
  const failed = sums.requests.get("failed") ?? 0;
  const seen = sums.seconds > 0;
  const queued = latest ? sumOf(latest.queue) : null;
  return [
    figure("Requests", seen ? `${short(sums.requestCount / sums.seconds)}/s` : "–", "in the last minute"),
    figure(
      "Failed",
      share(failed, sums.requestCount),
      `${whole(failed)} of ${whole(sums.requestCount)}: 5xx, timeouts, cut streams`,
      failed > 0,
    ),
    figure("First token p50", timeAt(0.5, sums.ttft), "from the request's arrival, all models"),
    figure("First token p95", timeAt(0.95, sums.ttft), "from the request's arrival, all models"),
    figure(
      "Prefix cache hits",
      share(sums.tokens.get("cache_read") ?? 0, sums.inputTokens),
      "share of prompt tokens read from a prefix cache",
    ),
    figure(
      "Output",
      seen ? `${short((sums.tokens.get("output") ?? 0) / sums.seconds)} tok/s` : "–",
      "generated tokens",
    ),
    figure("In flight", whole(latest?.inFlight), "requests in flight"),
    figure("Queued", whole(queued), "queued calls", (queued ?? 0) > 0),
    figure(
      "Overhead p95",
      timeAt(0.95, sums.overhead),
      "time in the gateway, without queue and upstreams",
    ),
  ];
}

/**
 * @param {string} name @param {string} value @param {string} title
 * @param {boolean} [stands] true to highlight the value
 */
function figure(name, value, title, stands = false) {
  return h("div", { title }, h("dt", null, name), h("dd", { class: stands ? "stands" : null }, value));
}

function makeCharts() {
  const rate = (/** @type {string} */ kind) => (/** @type {Sums} */ sums) =>
    (sums.requests.get(kind) ?? 0) / sums.seconds;
  return [
    {
      chart: new LineChart("Requests", { note: "per second", ms: HISTORY_MS, unit: short, ceiling: 1 }),
      lines: (/** @type {Point[]} */ points) => [
        { name: "answered", values: sliding(points, SMOOTH_MS, rate("answered")) },
        { name: "failed", values: sliding(points, SMOOTH_MS, rate("failed")) },
        {
          name: "rejected",
          values: sliding(points, SMOOTH_MS, (sums) => rate("refused")(sums) + rate("limited")(sums)),
        },
      ],
    },
    {
      chart: new LineChart("Time to first token", {
        note: "last minute",
        ms: HISTORY_MS,
        unit: duration,
        mark: roundDuration,
      }),
      lines: (/** @type {Point[]} */ points) => [
        { name: "p50", values: sliding(points, MINUTE_MS, (sums) => ms(quantile(0.5, sums.ttft))) },
        { name: "p95", values: sliding(points, MINUTE_MS, (sums) => ms(quantile(0.95, sums.ttft))) },
      ],
    },
    {
      chart: new LineChart("Prefix cache hit rate", {
        note: "by tokens",
        ms: HISTORY_MS,
        unit: (value) => `${whole(value)}%`,
        ceiling: 100,
      }),
      lines: (/** @type {Point[]} */ points) => [{ name: "cached", values: sliding(points, MINUTE_MS, cachedPercent) }],
    },
    {
      chart: new LineChart("Load", { note: "calls", ms: HISTORY_MS, unit: short, ceiling: 3 }),
      lines: (/** @type {Point[]} */ points) => [
        {
          name: "in flight",
          values: points.map((point) => /** @type {[number, number | null]} */ ([point.at, point.inFlight])),
        },
        {
          name: "queued",
          values: points.map((point) => /** @type {[number, number | null]} */ ([point.at, sumOf(point.queue)])),
        },
      ],
    },
  ];
}

/** @param {Sums} sums */
function cachedPercent(sums) {
  return sums.inputTokens > 0 ? (100 * (sums.tokens.get("cache_read") ?? 0)) / sums.inputTokens : null;
}

/**
 * A quantile as text. Beyond the histogram's last bound, only that bound is known.
 * @param {number} q @param {import("../prometheus.js").Buckets} buckets
 */
function timeAt(q, buckets) {
  const seconds = quantile(q, buckets);
  const beyond = seconds !== null && seconds === buckets.at(-2)?.[0];
  return `${beyond ? "> " : ""}${duration(ms(seconds))}`;
}

/** @param {number | null} seconds */
function ms(seconds) {
  return seconds === null ? null : 1000 * seconds;
}
