"""Unbilled work: attempts that no receipt bills, because another attempt or none of them answered the call.

No tenant pays for such an attempt, but its vendor may bill it. So the ledger gets an `unbilled` row with the tokens and
their cost by the list price, without the tenant's own terms. The tokens are:

  its answer had counts, as a prefill's has  exact: these counts, exchanged with the answer's (`prefilled_prompt.py`)
  the deployment has a usage record of it    exact: the counts in the record
  it keeps records, but has none of it       0: the request never arrived, or the engine lost its work with the record
  an error status, or nothing was sent       0: no vendor bills these
  the vendor's rule is `read_to_end`         estimate: the prompt, and an answer as long as the one that the call got
  any other rule                             estimate: the prompt, and what was received of the answer

The rules are those for clients that leave (`gateway.policy.disconnects`), because a cancelled attempt looks the same to
the vendor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from gateway.billing.ledger.rows import OpenCall, UnbilledWork
from gateway.billing.receipts import cost_of, select_price
from gateway.core.ids import new_event_id
from gateway.core.kv_transfer import PREFILLED
from gateway.core.money import atoms_to_text
from gateway.core.times import rfc3339, rfc3339_to_ns
from gateway.policy import Deployment, Price
from gateway.providers.base import Fault
from gateway.routing.attempt_log import NOT_SENT
from gateway.types import Call, Receipt, UnbilledTokens, Usage

_NOTHING_SENT = frozenset({NOT_SENT, Fault.CONNECT.value, Fault.POOL.value})


class UnbilledAttempt(msgspec.Struct, frozen=True):
    """One attempt that is not billed, and what is known of its end.

    `outcome` and `status` are those of the receipt's attempts. If the gateway died, they are unknown (None).
    """

    opened: OpenCall
    outcome: str | None = None
    status: int | None = None
    received_tokens: int = 0  # of its answer
    answer_tokens: int = 0  # of the answer that the call got from another attempt
    counted: Usage | None = None  # by the deployment, in its answer

    @property
    def has_ended(self) -> bool:
        """Whether the deployment has its record by now, or never will: it rejected the call, or did not receive it."""
        return self.outcome in _NOTHING_SENT or (self.status is not None and self.status >= 400)

    def estimate(self, prompt_tokens: int, deployment: Deployment | None) -> Usage:
        """What the vendor bills by its rule. `deployment` is None if the policy no longer has it."""
        if self.has_ended:
            return Usage()
        output = max(self.received_tokens, self.opened.output_tokens_received)
        if deployment is not None and deployment.bills_disconnect_by(stream=self.opened.stream) == "read_to_end":
            output = max(output, self.answer_tokens)
        return Usage(input_uncached=prompt_tokens, output=output)


def unbilled_attempts(receipt: Receipt, still_open: Sequence[OpenCall]) -> list[UnbilledAttempt]:
    """The attempts that a receipt does not close, with their outcomes from the receipt.

    Attempts at one deployment follow each other, so their rows in the receipt have the order of the attempts.
    """
    found = []
    for opened in sorted(still_open, key=lambda each: each.attempt):
        rows = [row for row in receipt.attempts if (row.deployment or receipt.deployment) == opened.deployment]
        earlier = sum(each.deployment == opened.deployment and each.attempt < opened.attempt for each in still_open)
        if earlier >= len(rows):
            found.append(UnbilledAttempt(opened, answer_tokens=receipt.output))
            continue
        row = rows[earlier]
        received = row.unbilled.output if row.unbilled is not None else 0
        counted = _counted_by(row.unbilled) if row.outcome == PREFILLED and row.unbilled is not None else None
        found.append(UnbilledAttempt(opened, row.outcome, row.status, received, receipt.output, counted))
    return found


def _counted_by(tokens: UnbilledTokens) -> Usage | None:
    """The counts of a receipt's attempt; None if they are an estimate."""
    uncached = tokens.input - tokens.cache_read
    return Usage(uncached, tokens.cache_read, output=tokens.output, exact=True) if tokens.exact else None


def unbilled_row(attempt: UnbilledAttempt, call: Call, usage: Usage, deployment: Deployment | None) -> UnbilledWork:
    """Make the row of an attempt. `cost` is None if no price is known."""
    opened = attempt.opened
    price = _price_of(call, usage, deployment, rfc3339_to_ns(opened.started))
    cost = 0 if not usage.total else None if price is None else cost_of(usage, price)
    return UnbilledWork(
        event_id=new_event_id(),
        call_id=opened.call_id,
        attempt=opened.attempt,
        tenant=opened.tenant,
        key_id=opened.key_id,
        model_asked=opened.model_asked,
        deployment=opened.deployment,
        started=opened.started,
        finished=max(rfc3339(time.time_ns()), opened.started),
        exact=usage.exact,
        input_uncached=usage.input_uncached,
        cache_read=usage.cache_read,
        cache_write=usage.cache_write,
        output=usage.output,
        reasoning=usage.reasoning,
        trace_id=opened.trace_id,
        outcome=attempt.outcome,
        cost=None if cost is None else atoms_to_text(cost),
        currency=None if price is None else price.currency,
    )


def _price_of(call: Call, usage: Usage, deployment: Deployment | None, time_ns: int) -> Price | None:
    if deployment is None:
        return None
    prices = call.policy.prices_of(call.model_name, deployment.name, deployment.region)
    if prices is None:
        return None
    return select_price(
        call.policy, prices, usage, tenant=call.principal.tenant.priced_as, class_name=call.class_name,
        service_tier=call.service_tier, time_ns=time_ns,
    )  # fmt: skip
