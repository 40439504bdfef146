"""How many tokens a prompt has, by the tokenizer of a server that would answer it: for clients that plan ahead.

The same phases as those of a call, up to its admission: the prompt that is counted is the one that would be sent. It
counts as a request, and uses neither tokens nor money, nor a place at a server. Where no server tells, there is no
number: a guess that is taken for a count fills a context to a point that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from gateway.core.errors import TokenCountUnavailable
from gateway.deployments.fleet import DeploymentState, Fleet
from gateway.endpoints.exchange import Exchange
from gateway.prompts.reader import BodyReader
from gateway.serve import Components
from gateway.telemetry import CallRecord
from gateway.types import Call, Outcome

MAX_ASKED = 2  # servers of one model, one after the other


class TokenCounting:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def count(
        self, components: Components, reader: BodyReader, exchange: Exchange, record: CallRecord, call_id: str
    ) -> None:
        """A story, as `serve` is one. Raises `TokenCountUnavailable` besides."""
        record.operation = None  # it is no call of a model
        timings, policy = record.timings, components.policies.current
        timings.enter("authenticate")
        principal = record.principal = await components.authenticator.authenticate(exchange.headers, policy)
        timings.enter("canonicalise")
        body = await exchange.body()
        call = await components.canonicaliser.canonicalised(
            reader, body, exchange.headers, call_id=call_id, principal=principal, policy=policy,
            now=asyncio.get_running_loop().time(), trace=record.trace,
        )  # fmt: skip
        exchange.watch()
        timings.enter("admit")
        reservation = await components.settler.admit(msgspec.structs.replace(call, max_output_tokens=0))
        exchange.reply_headers.update(reservation.headers)
        try:
            timings.enter("route")
            tokens = await self._counted(call)
        finally:
            await reservation.release()
        record.outcome = Outcome.COMPLETE
        await exchange.reply(200, msgspec.json.encode({"prompt_tokens": tokens}))

    async def _counted(self, call: Call) -> int:
        for deployment in self._worth_asking(call):
            if (tokens := await deployment.provider.count_prompt_tokens(call)) is not None:
                return tokens
        raise TokenCountUnavailable(f"no server of the model {call.asked_model!r} tells how many tokens a prompt has")

    def _worth_asking(self, call: Call) -> Iterator[DeploymentState]:
        now = asyncio.get_running_loop().time()
        deployments = sorted(self._fleet.deployments_of(call.model), key=lambda deployment: deployment.cooling(now))
        yield from deployments[:MAX_ASKED]
