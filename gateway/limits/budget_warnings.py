"""Warns when budgets are nearly spent, or spent unusually fast: webhooks and gauges.

There is an event for each threshold that a budget has crossed, one for each hour in which it is spent unusually fast
(`gateway.limits.unusual_spend` has the rule), and one for each period in which it is forecast to be spent.

Budgets are read from the storage every `CHECK_SECONDS`. Each account and threshold, or hour, is one event. Its
id is derived from both, so that a receiver that gets an event twice, for example from two gateways, knows it. What was
sent or dropped is kept in a file, so that a restart sends nothing again, and what was not is found and sent again.

Webhooks follow the Standard Webhooks specification (standardwebhooks.com): the headers `webhook-id`,
`webhook-timestamp` and `webhook-signature`, where the signature is `v1,` and the Base64 of the HMAC-SHA256 of
`id.timestamp.body`. An event that is not answered with 2xx is sent again after `RETRY_SECONDS`, and then dropped.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import heapq
import hmac
import json
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from gateway.core.errors import StorageUnavailable
from gateway.core.times import rfc3339
from gateway.limits.budget import BudgetLimit
from gateway.limits.budget_forecast import forecast_share, passed_share
from gateway.limits.report import remaining_limits
from gateway.limits.scope import tenant_prefix
from gateway.limits.slices import Slices
from gateway.limits.unusual_spend import HOUR_SECONDS, HourOfSpend, SpendPatterns
from gateway.policy import Secret, Tenant
from gateway.policy.file import PolicyHolder
from gateway.policy.webhooks import Webhook
from gateway.storage.base import ReservationStore

CHECK_SECONDS = 10.0
COMPLETE_SECONDS = 600.0  # between two checks of all budgets; so often other gateways' use is seen here
RETRY_SECONDS = (5.0, 300.0, 1_800.0, 7_200.0, 18_000.0)  # pauses before further attempts
SEND_SECONDS = 15.0  # timeout of one attempt
MAX_PENDING = 1_000  # events to be sent; beyond, the oldest are dropped
MAX_SHOWN = 200  # budgets in the gauges: those that are spent most
MAX_SENT = 100_000  # ids that are remembered

log = logging.getLogger(__name__)
Send = Callable[[str, Mapping[str, str], bytes], Awaitable[int]]


class BudgetWarnings:
    """Checks budgets and sends webhooks. Start `run` as a task in one worker of a gateway.

    `spent` has the spent share of the budgets that are spent most, by tenant, scope and period, for the gauges.
    `left` has what remains of them, by tenant, scope, period and currency. `pace` has the spend of this hour as a
    multiple of the usual one, by tenant and scope. `forecast` has the share that will be spent at the period's end.
    """

    def __init__(
        self,
        policies: PolicyHolder,
        counters: ReservationStore,
        resolve_secret: Callable[[Secret], str],
        file: Path,
        tenants: Callable[[], Iterable[Tenant]],
        *,
        slices: Slices | None = None,
        send: Send | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policies = policies
        self._counters = counters
        self._resolve_secret = resolve_secret
        self._file = file
        self._tenants = tenants
        self._slices = slices
        self._complete_at = -math.inf  # the last complete check
        self._found: dict[tuple[str, ...], tuple[float, float, str]] = {}  # share, left and currency
        self._send = send or _post
        self._clock = clock
        self._sent: dict[str, None] | None = None  # read from the file at the first check
        self._queued: set[str] = set()  # ids of the pending ones
        self._pending: deque[tuple[str, bytes, Webhook, int, float]] = deque()  # id, body, target, failures, due
        self.spent: dict[tuple[str, ...], float] = {}
        self.left: dict[tuple[str, ...], float] = {}
        self.pace: dict[tuple[str, ...], float] = {}
        self.forecast: dict[tuple[str, ...], float] = {}
        self._patterns = SpendPatterns(file.with_name(f"{file.name}-patterns"))
        self.sent = 0
        self.dropped = 0

    async def run(self) -> None:
        """Check and send, forever."""
        while True:
            try:
                await self.check()
            except StorageUnavailable as error:
                log.warning("budgets not checked for warnings: %s", error.message)
            await self.send_due()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Read the budgets, and queue the events of thresholds that were crossed. Raises `StorageUnavailable`.

        Between two complete checks, only the budgets of tenants that have called since the last check are read.
        """
        policy, now = self._policies.current, self._clock()
        hours: dict[tuple[str, ...], HourOfSpend] = {}
        used = self._used_roots()
        complete = used is None or not 0 <= now - self._complete_at < COMPLETE_SECONDS
        found: dict[tuple[str, ...], tuple[float, float, str]] = {}  # by tenant, scope and period
        for tenant in self._tenants():
            if not complete and tenant_prefix(tenant.root) not in (used or ()):
                continue
            currency = tenant.currency or next(iter(policy.currencies), "")
            keys = {key.id: key.limits for key in tenant.keys if key.limits is not None}
            for entry in await remaining_limits(tenant, keys, (BudgetLimit,), self._counters, now=now):
                amount, left = float(entry["amount"]), float(entry["left"])
                share = 1 - left / amount
                found[tenant.name, entry["scope"], entry["period"]] = (share, left, currency)
                account = (tenant.name, entry["scope"])
                hour = hours[account] = self._patterns.look(account, entry["period"], amount - left, now)
                for webhook in policy.webhooks:
                    self._queue_events(webhook, tenant.name, entry, share, hour, currency, now)
        await asyncio.to_thread(self._patterns.save)
        if complete:
            self._complete_at, self._found = now, found
        else:
            self._found.update(found)
        paces = {account: each.spent / each.usual for account, each in hours.items() if each.usual}
        self.pace = dict(heapq.nlargest(MAX_SHOWN, {**({} if complete else self.pace), **paces}.items(), key=_by_value))
        shown = heapq.nlargest(MAX_SHOWN, self._found.items(), key=lambda each: (each[1], each[0]))
        self.spent = {labels: share for labels, (share, _, _) in shown}
        self.left = {(*labels, currency): left for labels, (_, left, currency) in shown}
        expected = {labels: forecast_share(share, passed_share(labels[2], now)) for labels, share in self.spent.items()}
        self.forecast = {labels: share for labels, share in expected.items() if share is not None}

    def _used_roots(self) -> set[str] | None:
        """Take the names of the outermost tenants that have called since the last check. None if they are unknown."""
        if self._slices is None:
            return None
        used, self._slices.used_roots = self._slices.used_roots, set()
        return used

    def _queue_events(
        self, webhook: Webhook, tenant: str, entry: Mapping[str, Any], share: float, hour: HourOfSpend, currency: str,
        now: float,
    ) -> None:  # fmt: skip
        """Queue the events of one budget. `share` is the spent share."""
        for threshold in webhook.budgets_at:
            if share >= threshold:
                self._queue_threshold(webhook, tenant, entry, threshold, now)
        factor = webhook.unusual_at
        if factor is not None and hour.is_unusual(factor, float(webhook.unusual_min)):
            self._queue_unusual(webhook, tenant, entry, hour, currency, now)
        expected = forecast_share(share, passed_share(entry["period"], now))
        if webhook.forecast_at is not None and expected is not None and share < webhook.forecast_at <= expected:
            self._queue_forecast(webhook, tenant, entry, expected, now)

    def _queue_forecast(
        self, webhook: Webhook, tenant: str, entry: Mapping[str, Any], expected: float, now: float
    ) -> None:
        about = (webhook.url, tenant, entry["scope"], "forecast", entry["period"], entry["amount"])
        data = {
            "tenant": tenant, "scope": entry["scope"], "period": entry["period"], "amount": entry["amount"],
            "left": entry["left"], "forecast": round(float(entry["amount"]) * expected, 6),
        }  # fmt: skip
        self._queue(webhook, about, "budget.forecast", data, now)

    def _queue_threshold(
        self, webhook: Webhook, tenant: str, entry: Mapping[str, Any], threshold: float, now: float
    ) -> None:
        about = (webhook.url, tenant, entry["scope"], entry["period"], entry["amount"], f"{threshold:g}")
        data = {
            "tenant": tenant, "scope": entry["scope"], "period": entry["period"], "amount": entry["amount"],
            "left": entry["left"], "threshold": threshold,
        }  # fmt: skip
        self._queue(webhook, about, "budget.threshold_reached", data, now)

    def _queue_unusual(
        self, webhook: Webhook, tenant: str, entry: Mapping[str, Any], hour: HourOfSpend, currency: str, now: float
    ) -> None:
        about = (webhook.url, tenant, entry["scope"], "unusual", str(hour.hour))
        data = {
            "tenant": tenant, "scope": entry["scope"], "hour": rfc3339(hour.hour * HOUR_SECONDS * 10**9),
            "spent": round(hour.spent, 6), "usual": round(hour.usual or 0.0, 6), "currency": currency,
        }  # fmt: skip
        self._queue(webhook, about, "budget.unusual_spend", data, now)

    def _queue(self, webhook: Webhook, about: Sequence[str], kind: str, data: Mapping[str, Any], now: float) -> None:
        event_id = "msg_" + hashlib.sha256("\0".join(about).encode()).hexdigest()[:32]
        if self._sent is None:
            self._sent = dict.fromkeys(self._file.read_text().split()) if self._file.exists() else {}
        if event_id in self._sent or event_id in self._queued:
            return
        self._queued.add(event_id)
        body = {"type": kind, "timestamp": rfc3339(int(now * 1e9)), "data": data}
        if len(self._pending) == MAX_PENDING:
            self._drop(self._pending.popleft()[0], "too many events wait")
        self._pending.append((event_id, json.dumps(body).encode(), webhook, 0, now))

    def _remember(self, event_id: str) -> None:
        """Note that an event needs no further attempt, also after a restart."""
        assert self._sent is not None
        self._queued.discard(event_id)
        self._sent[event_id] = None
        try:
            if len(self._sent) > MAX_SENT:
                self._sent = dict.fromkeys([*self._sent][MAX_SENT // 2 :])
                self._file.write_text("\n".join(self._sent) + "\n")
            else:
                with self._file.open("a") as file:
                    file.write(event_id + "\n")
        except OSError as error:
            log.warning("%s: %s; a restart may send warnings of budgets again", self._file, error.strerror)

    async def send_due(self) -> None:
        """Send the events that are due. One that fails is queued again."""
        now = self._clock()
        for _ in range(len(self._pending)):
            event_id, body, webhook, failures, due = self._pending.popleft()
            if due > now:
                self._pending.append((event_id, body, webhook, failures, due))
                continue
            status = await self._attempt(event_id, body, webhook)
            if 200 <= status < 300:
                self.sent += 1
                self._remember(event_id)
            elif status == 410 or failures == len(RETRY_SECONDS):
                self._drop(event_id, f"the receiver answered {status}" if status else "the receiver did not answer")
            else:
                self._pending.append((event_id, body, webhook, failures + 1, now + RETRY_SECONDS[failures]))

    async def _attempt(self, event_id: str, body: bytes, webhook: Webhook) -> int:
        try:
            headers = signed_headers(event_id, int(self._clock()), body, self._resolve_secret(webhook.secret))
            return await self._send(webhook.url, headers, body)
        except (httpx2.HTTPError, OSError, ValueError) as error:
            log.warning("the webhook %s was not sent: %s", event_id, type(error).__name__)
            return 0

    def _drop(self, event_id: str, why: str) -> None:
        self.dropped += 1
        self._remember(event_id)
        log.error("the webhook %s is dropped: %s", event_id, why)


def _by_value(item: tuple[Any, float]) -> float:
    return item[1]


def signed_headers(event_id: str, timestamp: int, body: bytes, secret: str) -> dict[str, str]:
    """The headers of a webhook. The secret is `whsec_` and Base64. Raises `ValueError` if it is not."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        raise ValueError("the secret of a webhook must be whsec_ and Base64") from None
    signed = b"%b.%d.%b" % (event_id.encode(), timestamp, body)
    signature = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }


async def _post(url: str, headers: Mapping[str, str], body: bytes) -> int:
    async with httpx2.AsyncClient(timeout=SEND_SECONDS, follow_redirects=False) as client:
        return (await client.post(url, headers=dict(headers), content=body)).status_code
