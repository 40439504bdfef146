"""A DNS server over UDP whose records a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

TTL = 1


class ScriptedDns(asyncio.DatagramProtocol):
    """`records` has texts by type, as in {"A": ["10.0.0.1"]}. Without any of a type, the name does not exist."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.code: dns.rcode.Rcode | None = None  # of every answer, if set
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        (question,) = query.question
        texts = self.records.get(dns.rdatatype.to_text(question.rdtype), [])
        if self.code is not None:
            reply.set_rcode(self.code)
        elif texts:
            reply.answer.append(dns.rrset.from_text(question.name, TTL, question.rdclass, question.rdtype, *texts))
        else:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(reply.to_wire(), address)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        try:
            yield f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
        finally:
            transport.close()
