// @ts-check
// Formats numbers, durations, money and times for people, with units.

export const NOTHING = "–"; // shown if there is no value

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** @param {number | null | undefined} value */
export function whole(value) {
  return isNumber(value) ? WHOLE.format(value) : NOTHING;
}

/** Three significant digits: 0.42, 7.31, 48.2, 512, 12.4k, 3.1M. @param {number | null | undefined} value */
export function short(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  for (const [unit, letter] of /** @type {const} */ ([
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ])) {
    if (size >= unit) return `${digits(value / (letter === "k" ? 1e3 : unit))}${letter}`;
  }
  return size >= 1000 ? whole(value) : digits(value);
}

/** @param {number} value */
function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.01) return value > 0 ? "<0.01" : ">-0.01";
  return trimmed(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2));
}

/** @param {string} text */
function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** @param {number | null | undefined} ms @returns {string} */
export function duration(ms) {
  if (!isNumber(ms)) return NOTHING;
  if (ms < 0) return `-${duration(-ms)}`;
  if (ms === 0) return "0 ms";
  if (ms < 0.01) return "<0.01 ms";
  if (ms < 1000) return `${ms < 1 ? ms.toFixed(2) : ms < 100 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
  const seconds = ms / 1000;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return span(seconds);
}

/** A duration for an axis, whose numbers are round. @param {number} ms */
export function roundDuration(ms) {
  return duration(ms)
    .replace(/(\.\d*?)0+ /, "$1 ")
    .replace(". ", " ");
}

/** A longer time in its two largest units: 2 min 5 s, 3 h, 14 d 2 h. @param {number} seconds */
export function span(seconds) {
  let rest = Math.round(seconds);
  const parts = [];
  for (const [unit, size] of /** @type {const} */ ([
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ])) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) parts.push(`${count} ${unit}`);
    else if (parts.length) break;
    if (parts.length === 2) break;
  }
  return parts.join(" ") || "0 s";
}

const PERIODS = /** @type {Record<number, string>} */ ({ 1: "second", 60: "minute", 3600: "hour", 86400: "day" });

/** As in `per minute`, `per 30 s`. @param {number} seconds */
export function period(seconds) {
  return PERIODS[seconds] ?? span(seconds);
}

/** @param {number | null | undefined} part @param {number | null | undefined} all */
export function share(part, all) {
  if (!isNumber(part) || !isNumber(all) || all <= 0) return NOTHING;
  const percent = (100 * part) / all;
  if (percent > 0 && percent < 0.1) return "<0.1%";
  if (percent > 99.9 && percent < 100) return ">99.9%";
  return `${trimmed(percent.toFixed(percent < 10 ? 1 : 0))}%`;
}

/** The number of decimals for an amount of this size. @param {number} amount */
export function moneyPlaces(amount) {
  const size = Math.abs(amount);
  return size === 0 || size >= 100 ? 2 : size >= 1 ? 4 : 6;
}

/**
 * An amount with decimals by its size, or with exactly `places` decimals, so that a column is aligned.
 * @param {number | string | null | undefined} amount @param {string} [currency] @param {number} [places]
 */
export function money(amount, currency = "", places) {
  if (amount === null || amount === undefined || amount === "" || !Number.isFinite(Number(amount))) return NOTHING;
  const value = Number(amount);
  const most = places ?? moneyPlaces(value);
  const text = value.toLocaleString("en-US", { minimumFractionDigits: places ?? 2, maximumFractionDigits: most });
  const shown = value > 0 && Number(text.replaceAll(",", "")) === 0 ? `<${(10 ** -most).toFixed(most)}` : text;
  return currency ? `${shown} ${currency.toUpperCase()}` : shown;
}

/** `1 call`, `2 calls`. @param {number} count @param {string} one @param {string} [many] */
export function counted(count, one, many = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : many}`;
}

/** @param {Date} moment */
export function clock(moment) {
  return `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
}

/** Local time: the time of day, and the day if it is not today. @param {Date} moment @param {Date} [now] */
export function local(moment, now = new Date()) {
  const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
  return moment.toDateString() === now.toDateString() ? clock(moment) : `${day} ${clock(moment)}`;
}

/** @param {Date} moment */
export function utc(moment) {
  return `${moment.toISOString().replace("T", " ").replace("Z", "")} UTC`;
}

/** The UTC day, by which the ledger counts. @param {number} seconds since the epoch */
export function utcDay(seconds) {
  return new Date(seconds * 1000).toISOString().slice(0, 10);
}

/** @param {number} number */
function two(number) {
  return String(number).padStart(2, "0");
}

/** @param {unknown} value @returns {value is number} */
function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}
