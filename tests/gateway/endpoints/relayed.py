"""Relays a deployment's bytes through provider, meter and translator, as the gateway does, but without a socket."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from gateway.billing.metering import Meter
from gateway.core.errors import UpstreamCut
from gateway.endpoints.base import Endpoint
from gateway.prompts.reader import read_fields
from gateway.providers.base import ProviderFailure, Sink
from gateway.providers.redaction import NOTHING_SECRET, Redactor
from gateway.providers.responses import EventStreamResponse
from gateway.providers.transport import HTTPResponse
from gateway.types import Usage
from tests.gateway.calls import a_call


class ScriptedBody:
    """The body of an HTTP response that arrives in these pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = iter(pieces)

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration

    async def stream_to(self, sink: Sink, direct: Sink | None = None) -> bool:
        return all(sink(piece) for piece in self._pieces)


class Relayed(NamedTuple):
    content: bytes  # what the client gets, with times set to 0
    usage: Usage  # what is billed


def cut_at(stream: bytes, offsets: Sequence[int]) -> list[bytes]:
    ends = sorted({0, len(stream), *(min(offset, len(stream)) for offset in offsets)})
    return [stream[begin:end] for begin, end in pairwise(ends)]


def relayed(
    endpoint: Endpoint,
    body: dict[str, Any],
    pieces: Sequence[bytes],
    dialect: Callable[[HTTPResponse, Redactor], EventStreamResponse] = EventStreamResponse,
) -> Relayed:
    return asyncio.run(_relayed(endpoint, body, pieces, dialect))


async def _relayed(
    endpoint: Endpoint,
    body: dict[str, Any],
    pieces: Sequence[bytes],
    dialect: Callable[[HTTPResponse, Redactor], EventStreamResponse],
) -> Relayed:
    raw = json.dumps(body).encode()
    translator, meter, sent = endpoint.translator("req_abc"), Meter(a_call(raw, endpoint=endpoint)), list[bytes]()
    assert translator is not None
    translator.read(read_fields(raw), raw)

    def take(chunk: bytes) -> bool:
        passed_on = meter.watch(chunk)
        if passed_on or meter.complete:
            sent.append(translator.frames(passed_on, last=meter.complete))
        return not meter.complete

    try:
        await dialect(cast(HTTPResponse, ScriptedBody(pieces)), NOTHING_SECRET).stream_to(take)
        if not meter.complete:
            raise UpstreamCut("the answer ended without its end marker")
    except ProviderFailure as failure:
        sent.append(translator.error_frames(UpstreamCut(str(failure))))
    except UpstreamCut as failure:
        sent.append(translator.error_frames(failure))
    return Relayed(re.sub(rb'"(created_at|completed_at)":\d+', rb'"\1":0', b"".join(sent)), meter.usage)
