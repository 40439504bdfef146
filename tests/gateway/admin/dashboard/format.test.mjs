import assert from "node:assert/strict";
import test from "node:test";

import { ticks } from "../../../../gateway/admin/dashboard/charts.js";
import {
  counted,
  duration,
  local,
  money,
  period,
  roundDuration,
  share,
  short,
  span,
  utc,
  utcDay,
  whole,
} from "../../../../gateway/admin/dashboard/format.js";

const all = (format, cases) =>
  assert.deepEqual(
    Object.keys(cases).map((value) => format(Number(value))),
    Object.values(cases),
  );

test("numbers", () => {
  all(short, {
    0: "0",
    0.001: "<0.01",
    0.5: "0.5",
    7.314: "7.31",
    48.25: "48.3",
    512: "512",
    1234: "1,234",
    12400: "12.4k",
    3100000: "3.1M",
  });
  all(whole, { 0: "0", 1234567: "1,234,567" });
  assert.deepEqual([whole(null), whole(undefined), short(NaN)], ["–", "–", "–"]);
  assert.deepEqual(
    [counted(1, "call"), counted(0, "call"), counted(2000, "call")],
    ["1 call", "0 calls", "2,000 calls"],
  );
});

test("durations", () => {
  all(duration, {
    0: "0 ms",
    0.001: "<0.01 ms",
    0.25: "0.25 ms",
    12.34: "12.3 ms",
    999: "999 ms",
    1000: "1.00 s",
    65000: "65.0 s",
    125000: "2 min 5 s",
  });
  all(roundDuration, { 0: "0 ms", 0.5: "0.5 ms", 20: "20 ms", 100: "100 ms", 2500: "2.5 s", 5000: "5 s" });
  all(span, { 0: "0 s", 59: "59 s", 60: "1 min", 3600: "1 h", 3661: "1 h 1 min", 86400: "1 d", 1209600: "14 d" });
  all(period, { 60: "minute", 3600: "hour", 30: "30 s", 604800: "7 d" });
  assert.equal(duration(null), "–");
});

test("shares near 0% and 100% are not rounded to them", () => {
  const of = (part, whole) => share(part, whole);
  assert.deepEqual(
    [of(0, 10), of(1, 3), of(1, 100000), of(99999, 100000), of(10, 10), of(1, 0)],
    ["0%", "33%", "<0.1%", ">99.9%", "100%", "–"],
  );
});

test("money of any size, and aligned in a column", () => {
  assert.deepEqual(
    [money(0, "usd"), money(1234.5, "usd"), money("0.002293", "eur"), money(1.5)],
    ["0.00 USD", "1,234.50 USD", "0.002293 EUR", "1.50"],
  );
  assert.deepEqual(
    [money(0.0000001), money(0.0023, "usd", 6), money(0.00001, "", 2), money(null)],
    ["<0.000001", "0.002300 USD", "<0.01", "–"],
  );
});

test("times in local time and UTC", () => {
  const moment = new Date("2026-11-23T07:12:44.123Z");
  assert.equal(utc(moment), "2026-11-23 07:12:44.123 UTC");
  assert.match(local(moment, moment), /^\d\d:\d\d:44$/);
  assert.match(local(moment, new Date("2027-01-01T00:00:00Z")), /^2026-11-2\d \d\d:\d\d:44$/);
  assert.equal(utcDay(Date.parse("2026-11-23T23:59:59Z") / 1000), "2026-11-23");
});

test("the steps of a scale are round and cover the maximum", () => {
  assert.deepEqual(ticks(7, 3), [0, 2.5, 5, 7.5]);
  assert.deepEqual(ticks(0.3, 3), [0, 0.1, 0.2, 0.3]);
  assert.deepEqual(ticks(100, 3), [0, 50, 100]);
  assert.deepEqual(ticks(0, 3), [0, 1]);
});
