import assert from "node:assert/strict";
import test from "node:test";

import { parse, samples, total, totals } from "../../../../gateway/admin/dashboard/prometheus.js";

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
