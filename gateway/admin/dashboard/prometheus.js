// @ts-check
// Parses Prometheus' text format, and sums up series.

/**
 * @typedef {{ id: string, labels: Record<string, string>, value: number }} Sample
 * @typedef {{ at: number, families: Map<string, Sample[]> }} Snapshot  `at` in ms since the epoch
 * @typedef {(labels: Record<string, string>) => boolean} Where
 */

const LINE = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*$/;
const LABEL = /([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = /** @type {Record<string, string>} */ ({ n: "\n", '"': '"', "\\": "\\" });

/** Parses a scrape. Lines in another format are ignored. @param {string} text @param {number} at @returns {Snapshot} */
export function parse(text, at) {
  /** @type {Map<string, Sample[]>} */
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const [, name, id = "", number] = found;
    const value = numberOf(number);
    if (value === null) continue;
    const samples = families.get(name);
    const sample = { id, labels: labelsOf(id), value };
    if (samples) samples.push(sample);
    else families.set(name, [sample]);
  }
  return { at, families };
}

/** @param {string} text */
function numberOf(text) {
  if (text === "+Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  if (text === "NaN") return NaN;
  const value = Number(text);
  return Number.isNaN(value) ? null : value;
}

/** @param {string} text as in `{a="1",b="2"}` */
function labelsOf(text) {
  /** @type {Record<string, string>} */
  const labels = Object.create(null); // without prototype: a label may be named like a member of Object
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (whole, letter) => ESCAPES[letter] ?? whole);
  }
  return labels;
}

const anything = () => true;

/** @param {Snapshot} snapshot @param {string} name @param {Where} [where] @returns {Sample[]} */
export function samples(snapshot, name, where = anything) {
  return (snapshot.families.get(name) ?? []).filter((sample) => where(sample.labels));
}

/**
 * The sum over all series; null without series.
 * @param {Snapshot} snapshot @param {string} name @param {Where} [where]
 */
export function total(snapshot, name, where) {
  const found = samples(snapshot, name, where);
  return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : null;
}

/**
 * Sums by the value of a label.
 * @param {Snapshot} snapshot @param {string} name @param {string} label @param {Where} [where]
 */
export function totals(snapshot, name, label, where) {
  return summed(samples(snapshot, name, where), label);
}

/** @param {Sample[]} found @param {string} label @returns {Map<string, number>} */
function summed(found, label) {
  const sums = new Map();
  for (const { labels, value } of found) {
    const key = labels[label] ?? "";
    sums.set(key, (sums.get(key) ?? 0) + value);
  }
  return sums;
}
