"""Reads what a vendor has counted and billed, by day: the usage and cost APIs of OpenAI and Anthropic.

Both APIs return pages of buckets, one for each day (UTC), and need an admin key of the vendor's organisation. Formats:

  OpenAI       GET /v1/organization/usage/completions and /usage/embeddings, GET /v1/organization/costs
               https://platform.openai.com/docs/api-reference/usage
  Anthropic    GET /v1/organizations/usage_report/messages, GET /v1/organizations/cost_report
               https://platform.claude.com/docs/en/manage-claude/usage-cost-api

`compare_days` compares them with the ledger. The vendor counts a request on the day of its own clock, and the ledger on
the day when the call ended, so a call across midnight may drift on two days, but not in the total.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import msgspec

from gateway.billing.ledger.tables import connect
from gateway.billing.ledger.unreadable import UnreadableRow

REQUEST_SECONDS = 30.0
PAGES_MAX = 500  # of one report; a page has at least one day
PAGE_BYTES_MAX = 16 * 1024 * 1024
_COUNTS = ("input", "cached", "output")
_decode = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode


class VendorReportError(Exception):
    """A vendor's report cannot be read. The message names the request and says why."""


class DayCounts(msgspec.Struct):
    """Tokens of one day, and their cost by currency. `input` includes `cached`."""

    input: int = 0
    cached: int = 0
    output: int = 0
    cost: dict[str, Decimal] = {}

    def add_cost(self, currency: str, amount: Decimal) -> None:
        self.cost[currency] = self.cost.get(currency, Decimal(0)) + amount


class DayComparison(msgspec.Struct, frozen=True):
    """One day of a vendor's report and of the ledger. `day` is as in 2026-11-20, or `total`."""

    day: str
    vendor: DayCounts
    ledger: DayCounts

    def drift(self, of: str) -> int:
        """The vendor's count less the ledger's, of `input`, `cached` or `output`. Positive: the ledger lacks work."""
        return int(getattr(self.vendor, of) - getattr(self.ledger, of))

    def cost_drift(self) -> dict[str, Decimal]:
        """The vendor's cost less the ledger's, by currency."""
        currencies = sorted(self.vendor.cost.keys() | self.ledger.cost.keys())
        zero = Decimal(0)
        return {each: self.vendor.cost.get(each, zero) - self.ledger.cost.get(each, zero) for each in currencies}

    def worst_share(self) -> float:
        """The largest drift as share of the vendor's count or cost. 1 if there is drift but the vendor has nothing."""
        drifts = [(abs(self.drift(of)), getattr(self.vendor, of)) for of in _COUNTS]
        costs = [(abs(drift), self.vendor.cost.get(each, Decimal(0))) for each, drift in self.cost_drift().items()]
        return max(float(drift / counted) if counted else float(bool(drift)) for drift, counted in [*drifts, *costs])


class VendorReports(ABC):
    """The usage and cost APIs of one vendor, read with an admin key. Blocking; not thread-safe."""

    default_url: ClassVar[str]
    section_parameter: ClassVar[str]  # the filter by project or workspace

    def __init__(self, client: httpx2.Client, base_url: str | None = None, sections: Sequence[str] = ()) -> None:
        """`base_url` includes /v1. `sections` are ids of projects or workspaces; without any, all are read."""
        self._client = client
        self._base_url = (base_url or self.default_url).rstrip("/")
        self._sections = sections

    @staticmethod
    @abstractmethod
    def headers(admin_key: str) -> dict[str, str]:
        """The headers that authenticate requests with an admin key."""

    def read(self, since: date, until: date) -> dict[str, DayCounts]:
        """Return the counts and costs of the days from `since` to the day before `until`. Raises `VendorReportError`.

        Days without usage are absent.
        """
        days: dict[str, DayCounts] = {}
        try:
            self._read_usage(days, since, until)
            self._read_costs(days, since, until)
        except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation, msgspec.MsgspecError) as error:
            raise VendorReportError(
                f"{self._base_url}: the report has an unknown form: {type(error).__name__}: {error}"
            ) from error
        return days

    @abstractmethod
    def _read_usage(self, days: dict[str, DayCounts], since: date, until: date) -> None: ...

    @abstractmethod
    def _read_costs(self, days: dict[str, DayCounts], since: date, until: date) -> None: ...

    def _buckets(self, path: str, parameters: Mapping[str, str | int]) -> Iterator[dict[str, Any]]:
        """Yield the buckets of all pages."""
        fixed = [*parameters.items(), *((self.section_parameter, section) for section in self._sections)]
        page: str | None = None
        for _ in range(PAGES_MAX):
            content = self._get(path, fixed if page is None else [*fixed, ("page", page)])
            yield from content["data"]
            page = content.get("next_page")
            if not content.get("has_more") or page is None:
                return
        raise VendorReportError(f"{self._base_url}{path}: the report has more than {PAGES_MAX} pages")

    def _get(self, path: str, parameters: Sequence[tuple[str, str | int]]) -> dict[str, Any]:
        where = f"{self._base_url}{path}"
        try:
            with self._client.stream("GET", where, params=[*parameters]) as response:
                body = b""
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > PAGE_BYTES_MAX:
                        raise VendorReportError(f"{where}: a page has more than {PAGE_BYTES_MAX >> 20} MiB")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise VendorReportError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            why = {401: "; is it an admin key?", 403: "; has the key the right to read usage and costs?"}
            raise VendorReportError(f"{where}: status {response.status_code}{why.get(response.status_code, '')}")
        return _decode(body)


class OpenAIReports(VendorReports):
    """OpenAI: usage of completions (chats, responses) and embeddings, and costs. `cached` is part of `input_tokens`."""

    default_url = "https://api.openai.com/v1"
    section_parameter = "project_ids"

    @staticmethod
    def headers(admin_key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {admin_key}"}

    def _read_usage(self, days: dict[str, DayCounts], since: date, until: date) -> None:
        for kind in ("completions", "embeddings"):
            for bucket in self._buckets(f"/organization/usage/{kind}", {**_seconds(since, until), "limit": 31}):
                day = _day_of(days, datetime.fromtimestamp(bucket["start_time"], UTC))
                for result in bucket["results"]:
                    day.input += _count(result["input_tokens"])
                    day.cached += _count(result.get("input_cached_tokens"))
                    day.output += _count(result.get("output_tokens"))

    def _read_costs(self, days: dict[str, DayCounts], since: date, until: date) -> None:
        for bucket in self._buckets("/organization/costs", {**_seconds(since, until), "limit": 180}):
            day = _day_of(days, datetime.fromtimestamp(bucket["start_time"], UTC))
            for result in bucket["results"]:
                day.add_cost(result["amount"]["currency"].upper(), _money(result["amount"]["value"]))


class AnthropicReports(VendorReports):
    """Anthropic: usage of messages, and costs. Costs are in cents, and exclude the priority tier."""

    default_url = "https://api.anthropic.com/v1"
    section_parameter = "workspace_ids[]"

    @staticmethod
    def headers(admin_key: str) -> dict[str, str]:
        return {"x-api-key": admin_key, "anthropic-version": "2023-06-01"}

    def _read_usage(self, days: dict[str, DayCounts], since: date, until: date) -> None:
        for bucket in self._buckets("/organizations/usage_report/messages", {**_times(since, until), "limit": 31}):
            day = _day_of(days, datetime.fromisoformat(bucket["starting_at"]))
            for result in bucket["results"]:
                written = sum(map(_count, (result.get("cache_creation") or {}).values()))
                cached = _count(result.get("cache_read_input_tokens"))
                day.input += _count(result["uncached_input_tokens"]) + written + cached
                day.cached += cached
                day.output += _count(result["output_tokens"])

    def _read_costs(self, days: dict[str, DayCounts], since: date, until: date) -> None:
        parameters = {**_times(since, until), "limit": 31, "group_by[]": "workspace_id"}
        for bucket in self._cost_buckets(parameters):
            day = _day_of(days, datetime.fromisoformat(bucket["starting_at"]))
            for result in bucket["results"]:
                if not self._sections or result.get("workspace_id") in self._sections:
                    day.add_cost(result["currency"].upper(), _money(result["amount"]).scaleb(-2))

    def _cost_buckets(self, parameters: Mapping[str, str | int]) -> Iterator[dict[str, Any]]:
        """The cost report has no filter by workspace, so its results are grouped by them."""
        unfiltered = AnthropicReports(self._client, self._base_url)
        yield from unfiltered._buckets("/organizations/cost_report", parameters)


VENDORS: dict[str, type[VendorReports]] = {"openai": OpenAIReports, "anthropic": AnthropicReports}


def _seconds(since: date, until: date) -> dict[str, str | int]:
    start, end = (int(datetime(each.year, each.month, each.day, tzinfo=UTC).timestamp()) for each in (since, until))
    return {"start_time": start, "end_time": end, "bucket_width": "1d"}


def _times(since: date, until: date) -> dict[str, str | int]:
    return {"starting_at": f"{since}T00:00:00Z", "ending_at": f"{until}T00:00:00Z", "bucket_width": "1d"}


def _day_of(days: dict[str, DayCounts], start: datetime) -> DayCounts:
    return days.setdefault(start.astimezone(UTC).date().isoformat(), DayCounts())


def _count(value: Any) -> int:
    """A number of tokens. Absent counts are 0. Raises `ValueError`."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.40} is no number of tokens")
    return value


def _money(value: Any) -> Decimal:
    """An amount, a JSON number or decimal text. Raises `ValueError`."""
    amount = Decimal(str(value))
    if not amount.is_finite():
        raise ValueError(f"{value!r:.40} is no amount")
    return amount


def ledger_days(
    ledger: Path,
    deployments: Collection[str],
    since: date,
    until: date,
    *,
    set_aside: list[UnreadableRow] | None = None,
) -> dict[str, DayCounts]:
    """Sum the work of deployments by day, billed or not, as their vendor should have billed it.

    Costs are those of the price list, before the tenants' own terms. Raises `UnreadableLedger`.
    """
    with connect(ledger, set_aside=set_aside) as connection:
        found = connection.execute(
            "SELECT finished[:10] AS day, coalesce(price_currency, currency) AS listed_in,"
            " sum(input_uncached + cache_read + cache_write), sum(cache_read), sum(output),"
            " sum(coalesce(list_cost::DECIMAL(38, 15), cost)) FROM work"
            " WHERE list_contains($deployments, deployment) AND source IS DISTINCT FROM 'cache'"
            " AND finished >= $since AND finished < $until GROUP BY ALL ORDER BY ALL",
            {"deployments": [*deployments], "since": since.isoformat(), "until": until.isoformat()},
        ).fetchall()
    days: dict[str, DayCounts] = {}
    for day, currency, read, cached, output, cost in found:
        counts = days.setdefault(day, DayCounts())
        counts.input, counts.cached = counts.input + int(read), counts.cached + int(cached)
        counts.output += int(output)
        if currency is not None and cost is not None:
            counts.add_cost(currency, cost)
    return days


def compare_days(vendor: Mapping[str, DayCounts], ledger: Mapping[str, DayCounts]) -> list[DayComparison]:
    """Compare all days of both, in order. The last comparison is the total."""
    days = sorted(vendor.keys() | ledger.keys())
    compared = [DayComparison(day, vendor.get(day, DayCounts()), ledger.get(day, DayCounts())) for day in days]
    return [*compared, DayComparison("total", _total([*vendor.values()]), _total([*ledger.values()]))]


def _total(days: Sequence[DayCounts]) -> DayCounts:
    total = DayCounts()
    for day in days:
        total.input += day.input
        total.cached += day.cached
        total.output += day.output
        for currency, amount in day.cost.items():
            total.add_cost(currency, amount)
    return total


def whole_days(since: str | None, until: str | None, today: date) -> tuple[date, date]:
    """The days of a period whose bounds are RFC 3339. Default: the seven days before today. Raises `ValueError`."""
    first, last = (None if text is None else _midnight(text) for text in (since, until))
    last = last or today
    first = first or last - timedelta(days=7)
    if first >= last:
        raise ValueError("the period has no day")
    return first, last


def _midnight(text: str) -> date:
    moment = datetime.fromisoformat(text)
    if (moment.hour, moment.minute, moment.second, moment.microsecond) != (0, 0, 0, 0):
        raise ValueError(f"{text} is no start of a day (UTC): vendors report whole days")
    return moment.date()
