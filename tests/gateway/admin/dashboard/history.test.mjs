import assert from "node:assert/strict";
import test from "node:test";

import { History, HISTORY_MS, inputOf, outcomeKind, sliding, summed } from "../../../../gateway/admin/dashboard/history.js";
import { parse } from "../../../../gateway/admin/dashboard/prometheus.js";

const requests = (status, outcome, count) =>
  `warmpath_requests_total{operation="chat/completions",model="m",class="realtime",status="${status}",outcome="${outcome}"} ${count}`;
const tokens = (kind, count) => `warmpath_tokens_total{model="m",kind="${kind}"} ${count}`;

test("the kinds of outcomes", () => {
  const kinds = [
    [200, "complete"],
    [200, "upstream_cut"],
    [200, "client_gone"],
    [499, null],
    [401, "rejected"],
    [429, "rejected"],
    [502, "refused"],
    [504, "timeout"],
  ];
  assert.deepEqual(
    kinds.map(([status, outcome]) => outcomeKind(status, outcome)),
    ["answered", "failed", "left", "left", "refused", "limited", "failed", "failed"],
  );
});

test("points of the history and their sums", () => {
  const history = new History();
  history.add(
    parse([requests(200, "complete", 5), tokens("cache_read", 10), tokens("input_uncached", 10)].join("\n"), 1000),
  );
  assert.deepEqual(history.points, [], "a single scrape makes no point");
  history.add(
    parse(
      [
        requests(200, "complete", 9),
        requests(502, "refused", 2),
        tokens("cache_read", 40),
        tokens("input_uncached", 20),
      ].join("\n"),
      3000,
    ),
  );
  history.add(
    parse(
      [
        requests(200, "complete", 10),
        requests(502, "refused", 2),
        tokens("cache_read", 40),
        tokens("input_uncached", 20),
      ].join("\n"),
      5000,
    ),
  );
  const sums = summed(history.last(10_000));
  assert.equal(sums.seconds, 4);
  assert.deepEqual(
    [...sums.requests],
    [
      ["answered", 5],
      ["failed", 2],
    ],
  );
  assert.equal(sums.requestCount, 7);
  assert.equal(sums.inputTokens, 40);
  assert.equal(inputOf(sums.tokens), 40);
  assert.equal(summed(history.last(2000)).requestCount, 1);
  assert.deepEqual(
    sliding(history.points, 2000, (each) => each.requestCount),
    [
      [3000, 6],
      [5000, 1],
    ],
  );
});

test("the history is bounded", () => {
  const history = new History();
  for (let at = 0; at <= 2 * HISTORY_MS; at += 2000) history.add(parse("", at));
  assert.equal(history.points[0].at, HISTORY_MS);
  for (let at = 0; at < 3000; at += 1) history.add(parse("", 2 * HISTORY_MS + at));
  assert.equal(history.points.length, 1000);
  assert.equal(history.points.at(-1).at, 2 * HISTORY_MS + 2999);
});

test("points older than the history are dropped, also after a long pause", () => {
  const history = new History();
  history.add(parse("", 0));
  history.add(parse("", 2000));
  history.add(parse("", 10 * HISTORY_MS));
  assert.deepEqual(
    history.points.map((point) => point.at),
    [10 * HISTORY_MS],
  );
});
