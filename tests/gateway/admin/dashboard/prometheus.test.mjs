import assert from "node:assert/strict";
import test from "node:test";

import {
  bucketIncreases,
  increases,
  increasesBy,
  mergedBuckets,
  parse,
  quantile,
  samples,
  total,
  totals,
} from "../../../../gateway/admin/dashboard/prometheus.js";

const reading = (...lines) => parse(lines.join("\n"), 0);

test("labels with escapes, braces and commas", () => {
  const snapshot = reading(
    'calls_total{model="a\\"b\\\\n{x=\\"1\\",y}",tenant="two\\nlines"} 3',
    'calls_total{__proto__="p",constructor=""} 4',
  );
  assert.deepEqual(
    samples(snapshot, "calls_total").map(({ labels, value }) => [Object.entries(labels), value]),
    [
      [
        [
          ["model", 'a"b\\n{x="1",y}'],
          ["tenant", "two\nlines"],
        ],
        3,
      ],
      [
        [
          ["__proto__", "p"],
          ["constructor", ""],
        ],
        4,
      ],
    ],
  );
});

test("numbers in all notations, timestamps, and invalid lines", () => {
  const snapshot = reading(
    "# HELP a what",
    "# TYPE a gauge",
    "a 1e-3 1700000000",
    "b +Inf",
    "c NaN",
    "d -2.5",
    "",
    "not a line at all",
    "e {",
    "f 1x",
  );
  const values = [...snapshot.families].map(([name, found]) => [name, found[0].value]);
  assert.deepEqual(values, [
    ["a", 0.001],
    ["b", Infinity],
    ["c", NaN],
    ["d", -2.5],
  ]);
});

test("sums over series and by label; without series the sum is null", () => {
  const snapshot = reading(
    'depth{class="a",worker="0"} 1',
    'depth{class="a",worker="1"} 2',
    'depth{class="b",worker="0"} 4',
  );
  assert.equal(total(snapshot, "depth"), 7);
  assert.equal(total(snapshot, "nothing"), null);
  assert.deepEqual(
    [...totals(snapshot, "depth", "class")],
    [
      ["a", 3],
      ["b", 4],
    ],
  );
});

test("a counter that decreased has restarted at zero", () => {
  const [grown, fell] = increases(reading('n{k="1"} 10', 'n{k="2"} 10'), reading('n{k="1"} 12', 'n{k="2"} 3'), "n");
  assert.deepEqual([grown.value, fell.value], [2, 3]);
});

test("a restarted process counts from zero, even if its counter is higher than before", () => {
  const before = reading("process_start_time_seconds 100", "n 10");
  assert.equal(increases(before, reading("process_start_time_seconds 200", "n 12"), "n")[0].value, 12);
  assert.equal(increases(before, reading("process_start_time_seconds 100", "n 12"), "n")[0].value, 2);
});

test("a new series counts from zero, unless its worker is new", () => {
  const before = reading('process_start_time_seconds{worker="0"} 100', 'n{worker="0",k="1"} 5');
  const after = reading(
    'process_start_time_seconds{worker="0"} 100',
    'process_start_time_seconds{worker="1"} 50',
    'n{worker="0",k="1"} 6',
    'n{worker="0",k="2"} 7',
    'n{worker="1",k="1"} 1000',
  );
  assert.deepEqual([...increasesBy(before, after, "n", "worker")], [["0", 8]]);
});

const histogram = (...counts) =>
  ["0.1", "0.5", "1", "+Inf"].map((le, index) => `t_bucket{le="${le}"} ${counts[index]}`);

test("quantiles of the increase between two scrapes", () => {
  const buckets = bucketIncreases(
    reading(...histogram(100, 100, 100, 100)),
    reading(...histogram(100, 104, 108, 110)),
    "t",
  );
  assert.deepEqual(buckets, [
    [0.1, 0],
    [0.5, 4],
    [1, 8],
    [Infinity, 10],
  ]);
  assert.equal(quantile(0.2, buckets), 0.1 + 0.4 / 2);
  assert.equal(quantile(0.6, buckets), 0.75);
  assert.equal(quantile(0.99, buckets), 1, "of what is beyond all bounds, the last bound is all that is known");
});

test("quantiles of an empty histogram are null, and buckets of several scrapes add up", () => {
  assert.equal(quantile(0.5, []), null);
  assert.equal(
    quantile(0.5, [
      [1, 0],
      [Infinity, 0],
    ]),
    null,
  );
  assert.deepEqual(
    mergedBuckets([
      [
        [1, 2],
        [Infinity, 3],
      ],
      [
        [1, 1],
        [Infinity, 1],
      ],
    ]),
    [
      [1, 3],
      [Infinity, 4],
    ],
  );
});
