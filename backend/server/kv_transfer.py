"""vLLM's `kv_transfer_params` in requests and responses: how a proxy lets one engine prefill and another one decode.

    proxy --> prefill engine   max_tokens: 1, kv_transfer_params: {"do_remote_decode": true}
          <--                  kv_transfer_params: {"do_remote_prefill": true, "remote_host": ..., "remote_port": ...}
    proxy --> decode engine    the request itself, with the `kv_transfer_params` of that response

The decode engine loads the prompt's blocks by their hashes, which it computes itself. So a request needs no list of
blocks, can name an engine that computed them for another request, and gets no block of which it does not know the text
and the salt.

With `remote_tokens_kept`, which vLLM does not have, the blocks move: the other engine keeps those of so many tokens,
and drops the others that it has sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from backend.engine.block_transfer import BlockTransfer
from backend.kv_transfer.block_layout import BlockLayout
from backend.kv_transfer.peers import BlockSource, Peer
from backend.kv_transfer.prefix_loader import PrefixLoader
from backend.server.errors import InvalidRequest
from backend.server.kv_transfer_metrics import KvTransferMetrics
from backend.server.requests import GenerationRequest

FIELD = "kv_transfer_params"
HTTP_PORT = 80


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """How this server exchanges blocks with other engines: whether it serves them, and what loads them, if anything."""

    blocks: BlockTransfer
    layout: BlockLayout
    serves: bool
    loader: PrefixLoader | None
    metrics: KvTransferMetrics
    engine_id: str = field(default_factory=lambda: secrets.token_hex(16))


def block_source(transfer: KvTransfer | None, request: GenerationRequest) -> BlockSource | None:
    """The engine from which the prompt's blocks are to be loaded, if the request names one.

    Raises InvalidRequest if it asks for what this server does not do.
    """
    params = request.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return None
    if params.do_remote_decode:
        if params.do_remote_prefill:
            raise InvalidRequest("`do_remote_decode` and `do_remote_prefill` exclude each other.", param=FIELD)
        if transfer is None or not transfer.serves:
            raise InvalidRequest(f"`{FIELD}.do_remote_decode` requires an engine with --kv-transfer.", param=FIELD)
        if request.stream:
            raise InvalidRequest(f"`{FIELD}.do_remote_decode` requires `stream` to be false.", param=FIELD)
        return None
    if transfer is None or transfer.loader is None:
        raise InvalidRequest(f"`{FIELD}.do_remote_prefill` requires an engine with --kv-transfer-peers.", param=FIELD)
    if params.remote_host is None or params.remote_port is None:
        raise InvalidRequest(f"`{FIELD}` requires `remote_host` and `remote_port`.", param=FIELD)
    return BlockSource(Peer(params.remote_host, params.remote_port), params.remote_tokens_kept)


def response_params(
    transfer: KvTransfer | None, request: GenerationRequest, headers: Mapping[str, str], request_id: str
) -> dict[str, object]:
    """The response's field for a request with `do_remote_decode`, or nothing.

    It names this engine by the address at which the client has reached it: the request's Host header.
    """
    if transfer is None or request.kv_transfer_params is None or not request.kv_transfer_params.do_remote_decode:
        return {}
    host, port = _address(headers.get("host", ""))
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": transfer.engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": [],  # blocks are found by hash
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
    }
    return {FIELD: params}


def _address(host_header: str) -> tuple[str | None, int]:
    """The host and port of a Host header. No host if the port is impossible or the address malformed."""
    try:
        address = urlsplit(f"//{host_header}")
        return address.hostname, address.port or HTTP_PORT
    except ValueError:
        return None, HTTP_PORT
