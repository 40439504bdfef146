// @ts-check
// The charts of the history: requests, errors, times, hit rate, tokens, cost, in flight and queued.

import { duration, money, roundDuration, short, whole } from "../format.js";
import { largest, perSecond } from "../history.js";
import { LineChart } from "../line_chart.js";

const ERRORS_MAX = 3; // lines in the chart of errors
const HOUR_SECONDS = 3600;

/**
 * @typedef {import("../history.js").Point} Point
 * @typedef {{ name: string, of: (point: Point) => number | null }} Series
 */

/** @type {{ title: string, options: ConstructorParameters<typeof LineChart>[1], series: (points: Point[]) => Series[] }[]} */
const CHARTS = [
  {
    title: "Requests",
    options: { note: "per second", unit: short, ceiling: 1 },
    series: () => [
      { name: "answered", of: (point) => perSecond(point.results.answered ?? 0, point) },
      { name: "failed", of: (point) => perSecond(point.results.failed ?? 0, point) },
      {
        name: "rejected",
        of: (point) => perSecond((point.results.rejected ?? 0) + (point.results.limited ?? 0), point),
      },
    ],
  },
  {
    title: "Time to first token",
    options: { note: "last minute", unit: duration, mark: roundDuration },
    series: () => [
      { name: "p50", of: (point) => point.ttft_ms.p50 },
      { name: "p95", of: (point) => point.ttft_ms.p95 },
      { name: "p99", of: (point) => point.ttft_ms.p99 },
    ],
  },
  {
    title: "Errors",
    options: { note: "per minute, by cause", unit: short, ceiling: 1 },
    series: (points) => {
      const causes = largest(points, (point) => point.errors, ERRORS_MAX);
      return causes.length
        ? causes.map((name) => ({ name, of: (point) => minutely(point.errors[name] ?? 0, point) }))
        : [{ name: "none", of: () => 0 }];
    },
  },
  {
    title: "Prefix cache hit rate",
    options: { note: "by tokens", unit: (value) => `${whole(value)}%`, ceiling: 100 },
    series: () => [{ name: "cached", of: (point) => (point.hit_rate === null ? null : 100 * point.hit_rate) }],
  },
  {
    title: "Tokens",
    options: { note: "per second", unit: short, ceiling: 1 },
    series: () => [
      { name: "prompt", of: (point) => perSecond(point.prompt_tokens, point) },
      { name: "cached", of: (point) => perSecond(point.cached_tokens, point) },
      { name: "output", of: (point) => perSecond(point.output_tokens, point) },
    ],
  },
  {
    title: "Cost",
    options: { note: "per hour", unit: (value) => money(value) },
    series: (points) =>
      currencies(points).map((currency) => ({
        name: currency,
        of: (point) => hourly(point.cost[currency] ?? 0, point),
      })),
  },
  {
    title: "In flight",
    options: { note: "calls", unit: whole, ceiling: 3 },
    series: () => [{ name: "in flight", of: (point) => point.in_flight }],
  },
  {
    title: "Queue",
    options: { note: "calls", unit: whole, ceiling: 3 },
    series: () => [{ name: "queued", of: (point) => point.queued }],
  },
];

export function historyCharts() {
  const charts = CHARTS.map(({ title, options, series }) => ({ chart: new LineChart(title, options), series }));
  return {
    elements: charts.map(({ chart }) => chart.element),
    /** @param {import("../history.js").History} history */
    show({ points, from, to }) {
      for (const { chart, series } of charts) {
        const lines = series(points).map(({ name, of }) => ({
          name,
          values: points.map((point) => /** @type {[number, number | null]} */ ([1000 * point.at, of(point)])),
        }));
        chart.show(lines, 1000 * from, 1000 * to);
      }
    },
    close() {
      for (const { chart } of charts) chart.close();
    },
  };
}

/** The history as rows of a CSV file. @param {import("../history.js").History} history */
export function historyRows({ points }) {
  const money = currencies(points);
  const heads = [
    "time",
    "seconds",
    "answered",
    "failed",
    "rejected",
    "limited",
    "disconnected",
    "ttft_p50_ms",
    "ttft_p95_ms",
  ];
  const more = [
    "ttft_p99_ms",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "in_flight",
    "queued",
    "storage_timeouts",
  ];
  const rows = points.map((point) => [
    new Date(1000 * point.at).toISOString(),
    point.seconds,
    ...["answered", "failed", "rejected", "limited", "disconnected"].map((name) => point.results[name] ?? 0),
    ...[point.ttft_ms.p50, point.ttft_ms.p95, point.ttft_ms.p99],
    ...[point.prompt_tokens, point.cached_tokens, point.output_tokens],
    ...[point.in_flight, point.queued, point.storage_timeouts],
    ...money.map((currency) => point.cost[currency] ?? 0),
  ]);
  return [[...heads, ...more, ...money.map((currency) => `cost_${currency}`)], ...rows];
}

/** @param {Point[]} points */
function currencies(points) {
  return largest(points, (point) => point.cost, ERRORS_MAX);
}

/** @param {number} count @param {Point} point */
function minutely(count, point) {
  const rate = perSecond(count, point);
  return rate === null ? null : 60 * rate;
}

/** @param {number} amount @param {Point} point */
function hourly(amount, point) {
  const rate = perSecond(amount, point);
  return rate === null ? null : HOUR_SECONDS * rate;
}
