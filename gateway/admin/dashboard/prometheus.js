// @ts-check
// Parses Prometheus' text format, and computes increases of counters and quantiles of histograms from two scrapes.

/**
 * @typedef {{ id: string, labels: Record<string, string>, value: number }} Sample
 * @typedef {{ at: number, families: Map<string, Sample[]> }} Snapshot  `at` in ms since the epoch
 * @typedef {(labels: Record<string, string>) => boolean} Where
 * @typedef {[le: number, count: number][]} Buckets  ascending upper bounds, and the observations up to each
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

/**
 * The increase of each series of a counter. A process that restarted meanwhile, and a series that is new, counted from
 * zero. Series of a process that is missing in `before` are omitted, since their increase is unknown.
 * @param {Snapshot} before @param {Snapshot} after @param {string} name @param {Where} [where] @returns {Sample[]}
 */
export function increases(before, after, name, where) {
  const started = new Map(
    samples(before, "process_start_time_seconds").map((each) => [each.labels.worker, each.value]),
  );
  const startedNow = new Map(
    samples(after, "process_start_time_seconds").map((each) => [each.labels.worker, each.value]),
  );
  const old = new Map(samples(before, name).map((sample) => [sample.id, sample.value]));
  const known = (/** @type {string} */ worker) => started.size === 0 || started.has(worker);
  return samples(after, name, where)
    .filter(({ labels }) => known(labels.worker))
    .map((sample) => {
      const same = started.get(sample.labels.worker) === startedNow.get(sample.labels.worker);
      const base = same ? (old.get(sample.id) ?? 0) : 0;
      return { ...sample, value: sample.value >= base ? sample.value - base : sample.value };
    });
}

/**
 * @param {Snapshot} before @param {Snapshot} after @param {string} name @param {string} label @param {Where} [where]
 */
export function increasesBy(before, after, name, label, where) {
  return summed(increases(before, after, name, where), label);
}

/** The increase of a histogram between two scrapes. @param {Snapshot} before @param {Snapshot} after
 * @param {string} name without `_bucket` @param {Where} [where] @returns {Buckets} */
export function bucketIncreases(before, after, name, where) {
  const counts = summed(increases(before, after, `${name}_bucket`, where), "le");
  return [...counts]
    .map(([le, count]) => /** @type {[number, number]} */ ([numberOf(le) ?? NaN, count]))
    .sort(([a], [b]) => a - b);
}

/** @param {Buckets[]} several of one histogram @returns {Buckets} */
export function mergedBuckets(several) {
  /** @type {Map<number, number>} */
  const sums = new Map();
  for (const [le, count] of several.flat()) sums.set(le, (sums.get(le) ?? 0) + count);
  return [...sums].sort(([a], [b]) => a - b);
}

/**
 * A quantile as PromQL's histogram_quantile computes it: linear within a bucket; beyond all buckets, the highest bound.
 * Null if the histogram is empty.
 * @param {number} q 0 to 1 @param {Buckets} buckets
 */
export function quantile(q, buckets) {
  const count = buckets.at(-1)?.[1] ?? 0;
  if (buckets.length < 2 || !(count > 0)) return null;
  const rank = q * count;
  const place = buckets.findIndex(([, below]) => below >= rank);
  const [upper, below] = buckets[place];
  if (upper === Infinity) return buckets[place - 1][0];
  const [lower, under] = place ? buckets[place - 1] : [0, 0];
  return below === under ? upper : lower + ((upper - lower) * (rank - under)) / (below - under);
}
