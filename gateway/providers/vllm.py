"""vLLM, and Warmpath's own engine, which speaks its dialect: OpenAI's, and more that a gateway wants."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

import msgspec

from gateway.policy import Deployment, EnvSecret
from gateway.providers.openai import OpenAI
from gateway.providers.transport import HTTPTransport
from gateway.types import Call, Operation, TokenCounters

MAX_METRICS_BYTES = 8 * 1024 * 1024
MAX_TOKENIZED_BYTES = 32 * 1024 * 1024  # it tells every token, too
_PROMPT = (
    "prompt", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
_COUNTER = re.compile(
    rb"^(?:vllm|sglang|warmpath):(prompt|generation|unwanted)_tokens_total(?:\{(.*)\})? +(\S+)", re.MULTILINE
)


class _Tokenized(msgspec.Struct):
    count: int


_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
_encode = msgspec.json.encode
_tokenized = msgspec.json.Decoder(_Tokenized).decode


@lru_cache(maxsize=10_000)  # a salt for each tenant
def _encoded(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))


class VLLM(OpenAI):
    """OpenAI's dialect plus `cache_salt`.

    Usage is asked for at the end, and in every chunk (`continuous_usage_stats`) where the policy says so. `priority` is
    sent where it says so, too: vLLM refuses it unless its scheduler was started with `--scheduling-policy priority`.
    """

    # Fields by which a client would reach past the gateway: into other tenants' caches, ahead of their requests, and,
    # as `kv_transfer_params` names hosts to fetch KV blocks from, into the network.
    reserved: ClassVar[tuple[str, ...]] = ("cache_salt", "priority", "kv_transfer_params")
    continues_final_message = True

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[EnvSecret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._knows_priorities = deployment.priorities

    @property
    def health_path(self) -> bytes:
        return self.root_path + b"/health"

    @property
    def root_path(self) -> bytes:
        """Where the server has what is not OpenAI's: beside /v1."""
        return self._base_path.removesuffix(b"/v1")

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """By /tokenize, which takes a call's own words for its prompt."""
        heard = self.heard(call)
        body = msgspec.json.encode({name: heard[name] for name in ("model", *_PROMPT) if name in heard})
        told = await self._post(self.root_path + b"/tokenize", body, MAX_TOKENIZED_BYTES)
        try:
            return None if told is None else _tokenized(told).count
        except msgspec.MsgspecError:  # a list of prompts, or a server without this
            return None

    async def token_counters(self) -> TokenCounters | None:
        metrics = await self._get(self.root_path + b"/metrics", MAX_METRICS_BYTES)
        return None if metrics is None else read_counters(metrics, self._served.encode())

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        fields = super().fields(call)
        for name in self.reserved:
            fields.pop(name, None)
        if call.operation is Operation.EMBEDDING:
            return fields
        if call.cache_salt:
            fields["cache_salt"] = _encoded(call.cache_salt)
        if self._knows_priorities:
            fields["priority"] = self._priority(call)
        return fields

    def _priority(self, call: Call) -> msgspec.Raw:
        """In the server's own sense: here the lowest goes first, as in the policy."""
        return msgspec.Raw(b"%d" % call.latency_class.priority)


def read_counters(metrics: bytes, model: bytes) -> TokenCounters | None:
    """What stands in Prometheus's text: of `model` where it is named there, else of all; of each rank."""
    found = [(kind, labels, int(float(value))) for kind, labels, value in _COUNTER.findall(metrics)]
    named = b'model_name="%b"' % model
    own = [one for one in found if named in one[1]] or found
    if not own:
        return None
    kinds = (b"prompt", b"generation", b"unwanted")
    return TokenCounters(*(sum(value for of, _, value in own if of == kind) for kind in kinds))


RECORD_MAX_SECONDS = 2.0  # in all: a caller waits for it to be told of a failure
RECORD_WAITS_SECONDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # until an engine has noticed that nobody listens any more


class Warmpath(VLLM):
    """The bundled engine. Its scheduler always knows priorities (lower goes first), and it keeps a record of each call
    for a while, so that one that ended early is billed by the engine's own count.
    """

    has_usage_records = True
    knows_deadlines = True

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[EnvSecret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._knows_priorities = True

    def fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """An effort that is only advised goes to the chat template, which need not read it; the engine refuses the
        field where it does not."""
        fields = super().fields(call)
        if "reasoning_effort" in call.hints and (effort := fields.pop("reasoning_effort", None)) is not None:
            options = _options(fields.get("chat_template_kwargs", b"null")) or {}
            fields["chat_template_kwargs"] = msgspec.Raw(_encode({"reasoning_effort": effort, **options}))
        return fields

    async def recorded_usage(self, call_id: str) -> bytes | None:
        path = b"%b/requests/%b" % (self.root_path, call_id.encode())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECORD_MAX_SECONDS):
                for seconds in RECORD_WAITS_SECONDS:
                    await asyncio.sleep(seconds)
                    if (record := await self._get(path)) is not None:
                        return record
        return None
