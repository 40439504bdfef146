"""Answers token-counting requests: counts a prompt with a deployment's own tokenizer, without generating.

The phases are those of `gateway.serve` up to admission, so the counted prompt is the one that would be sent. It counts
as one request. It uses no tokens, money or concurrency slot. If no deployment can count, the client gets an error
instead of a guess: a guess taken for a count would make it fill a context too far or not far enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from gateway.billing.usage_bounds import is_plausible_prompt
from gateway.core.errors import TokenCountUnavailable
from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState
from gateway.endpoints.exchange import Exchange
from gateway.prompts.reader import BodyReader
from gateway.serve import Components
from gateway.telemetry import CallRecord
from gateway.types import Call, Outcome

MAX_ATTEMPTS = 2  # deployments of one model, one after the other


class TokenCounting:
    """Answers `count_tokens` and `input_tokens` requests."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def count(
        self, components: Components, reader: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
    ) -> None:
        """Count the prompt of one request and reply. A `Story` like `serve`; also raises `TokenCountUnavailable`."""
        record.operation = None  # telemetry does not count it as a model call
        timings, policy = record.timings, components.policies.current
        timings.enter("authenticate")
        exchange.check_announced_body()
        principal = record.principal = await components.authenticator.authenticate(exchange.headers, policy)
        timings.enter("canonicalise")
        body = await exchange.body()
        if policy.hooks:
            body = await components.hooks.before(body, policy, exchange.path, call_id, principal)
        call = await components.canonicaliser.load_and_canonicalise(
            reader, body, exchange.headers, call_id=call_id, principal=principal, policy=policy,
            now=asyncio.get_running_loop().time(), trace=record.trace,
        )  # fmt: skip
        exchange.watch()
        timings.enter("admit")
        reservation = await components.settler.admit(
            msgspec.structs.replace(call, max_output_tokens=0), from_slices=True
        )
        exchange.reply_headers.update(reservation.headers)
        try:
            timings.enter("route")
            tokens = await self._counted(call)
        finally:
            await reservation.release()
        record.outcome = Outcome.COMPLETE
        await exchange.reply(200, msgspec.json.encode({"prompt_tokens": tokens}))

    async def _counted(self, call: Call) -> int:
        for deployment in self._candidates(call):
            tokens = await deployment.provider.count_prompt_tokens(call)
            if tokens is not None and is_plausible_prompt(call, tokens, deployment.config.added_prompt_tokens):
                return tokens
        raise TokenCountUnavailable(f"no deployment of the model {call.asked_model!r} can count a prompt's tokens")

    def _candidates(self, call: Call) -> Iterator[DeploymentState]:
        now = asyncio.get_running_loop().time()
        able = [one for one in self._fleet.deployments_of(call.model) if one.provider.unsupported_error(call) is None]
        deployments = sorted(able, key=lambda one: one.is_deprioritised(now))
        yield from deployments[:MAX_ATTEMPTS]
