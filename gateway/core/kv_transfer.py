"""vLLM's `kv_transfer_params`: one engine computes a prompt, and another one loads its keys and values.

    gateway --> prefill deployment   the request for one token, with `PREFILL`
            <--                      params of the prompt's blocks, which only the engines understand
    gateway --> decode deployment    the request itself, with these params

The names of the members are those of vLLM's `NixlConnector`. The bundled engine finds blocks by their hashes, so it
also accepts params that name any engine that has them (`load_from`).
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

FIELD = "kv_transfer_params"
PREFILLED = "prefilled"  # outcome of an attempt: it computed the prompt, and another deployment answers
PREFILL = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
# Fields that only shape an answer of more than one token, or of several choices. Engines reject some of them with one.
_OMITTED = frozenset({"stream", "stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs"})
_LIMITS = ("max_completion_tokens", "max_tokens")  # of which the bundled engine accepts only one
_ONE = msgspec.Raw(b"1")


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)


def prefill_fields(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The fields of a request that computes the prompt of `fields`, and one token."""
    kept = {name: value for name, value in fields.items() if name not in _OMITTED and name not in _LIMITS}
    return {**kept, next((name for name in _LIMITS if name in fields), _LIMITS[1]): _ONE, FIELD: PREFILL}


def read_answer(body: bytes) -> tuple[msgspec.Raw | None, bytes]:
    """The params of a prefill deployment's answer, if it has any, and the JSON of its usage. Raises nothing."""
    try:
        answer = _answer.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None, b"null"
    params = bytes(answer.kv_transfer_params)
    return (msgspec.Raw(params) if params not in (b"null", b"{}") else None), bytes(answer.usage)


def load_from(base_url: str, kept_tokens: int | None = None) -> msgspec.Raw:
    """Params with which the bundled engine loads a prompt's blocks from the engine at `base_url`, if that has them.

    That engine keeps the blocks of the first `kept_tokens` of them, and drops the others. None: it keeps all.
    """
    host, port = _address(base_url)
    params: dict[str, object] = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
    if kept_tokens is not None:
        params["remote_tokens_kept"] = kept_tokens
    return msgspec.Raw(msgspec.json.encode(params))


@lru_cache(maxsize=1_000)
def _address(base_url: str) -> tuple[str | None, int]:
    url = urlsplit(base_url)
    return url.hostname, url.port or 80
