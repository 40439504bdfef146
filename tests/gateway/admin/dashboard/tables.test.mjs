import assert from "node:assert/strict";
import test from "node:test";

import { csvOf } from "../../../../gateway/admin/dashboard/csv.js";
import { compared } from "../../../../gateway/admin/dashboard/data_table.js";
import { events } from "../../../../gateway/admin/dashboard/sse.js";

test("CSV: quotes, line breaks and commas are quoted, and a name is never a formula", () => {
  assert.equal(
    csvOf([
      ["a", "b"],
      ['say "hi", all', "two\nlines"],
      [1.5, null],
      ["=1+1", "-x"],
      [-2, undefined],
    ]),
    'a,b\r\n"say ""hi"", all","two\nlines"\r\n1.5,\r\n\'=1+1,\'-x\r\n-2,\r\n',
  );
});

test("sorting: numbers by size, text by letters, and rows without a value last in both directions", () => {
  const sorted = (values, sign) => [...values].sort((a, b) => compared(a, b, sign));
  assert.deepEqual(sorted([10, 9, null, 100], 1), [9, 10, 100, null]);
  assert.deepEqual(sorted([10, 9, null, 100], -1), [100, 10, 9, null]);
  assert.deepEqual(sorted(["b", "", "a"], -1), ["b", "a", ""]);
});

test("events of a stream, however its bytes are cut", async () => {
  const bytes = new TextEncoder().encode(
    ': comment\r\n\r\ndata: {"text":"é"}\n\ndata:{"n":2}\n\ndata: [DONE]\n\ndata: {"n":3}\n\n',
  );
  for (const size of [1, 3, 1000]) {
    const parts = Array.from({ length: Math.ceil(bytes.length / size) }, (_, i) =>
      bytes.slice(i * size, (i + 1) * size),
    );
    const found = [];
    for await (const event of events(ReadableStream.from(parts))) found.push(event);
    assert.deepEqual(found, [{ text: "é" }, { n: 2 }]);
  }
});
