"""The providers for vLLM and for the bundled engine (`Warmpath`): OpenAI's API with cache salt and priority.

Additional endpoints of vLLM count a prompt's tokens and report token counters. The bundled engine has vLLM's API, and
also keeps a record of each call's usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

import msgspec

from gateway.core.kv_transfer import FIELD, PREFILL, prefill_fields
from gateway.core.native_requests import NativeRequest
from gateway.core.worker_thread import in_thread
from gateway.policy import Deployment, Secret
from gateway.providers.openai import OpenAI
from gateway.providers.sse import UNREADABLE
from gateway.providers.transport import HTTPTransport
from gateway.providers.usage.base import COUNT_MAX, TokenCount
from gateway.types import Call, Operation, TokenCounters

MAX_METRICS_BYTES = 8 * 1024 * 1024
MAX_TOKENIZED_BYTES = 32 * 1024 * 1024  # the response of /tokenize lists every token
_PROMPT_FIELDS = (
    "prompt", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
_COUNTER = re.compile(
    rb"^(?:vllm|sglang|warmpath):(prompt|generation|unwanted)_tokens_total(?:\{(.*)\})? +(\S+)", re.MULTILINE
)


class _Tokenized(msgspec.Struct):
    count: TokenCount


_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode
_encode = msgspec.json.encode
_tokenized = msgspec.json.Decoder(_Tokenized).decode


@lru_cache(maxsize=10_000)  # each tenant has one salt
def _encoded(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text))


class VLLM(OpenAI):
    """Provider for vLLM: OpenAI's API with `cache_salt` and `priority`.

    Usage is requested at the end of a stream, and in every chunk (`continuous_usage_stats`) if the policy sets
    `continuous_usage`. `priority` is sent only if the policy sets `priorities`, because vLLM rejects it unless vLLM
    runs with `--scheduling-policy priority`.
    """

    # Removed from clients' requests, because they bypass the gateway: `cache_salt` reads other tenants' caches,
    # `priority` overtakes their requests, and `kv_transfer_params` names hosts to fetch KV blocks from.
    reserved_fields: ClassVar[tuple[str, ...]] = ("cache_salt", "priority", FIELD)
    continues_final_message = True
    salts_counts: ClassVar[bool] = False  # whether /tokenize takes a cache salt, so that tenants take turns there

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._sends_priority = deployment.priorities

    @property
    def health_path(self) -> bytes:
        return self.root_path + b"/health"

    @property
    def root_path(self) -> bytes:
        """Return the base path without /v1. The endpoints that are not OpenAI's are under this path."""
        return self._base_path.removesuffix(b"/v1")

    async def count_prompt_tokens(self, call: Call) -> int | None:
        """Count a prompt's tokens with /tokenize, which accepts the prompt fields of a chat or completion request.

        Returns None for a prompt with media, because /tokenize counts each image as one placeholder.
        """
        if call.media is not None:
            return None
        return await self._tokenize(await in_thread(self._counted, call) if call.large else self._counted(call))

    def _counted(self, call: Call) -> bytes:
        fields = self.prompt_fields(call)
        counted = {name: fields[name] for name in ("model", *_PROMPT_FIELDS) if name in fields}
        if self.salts_counts and call.cache_salt:
            counted["cache_salt"] = _encoded(call.cache_salt)
        return msgspec.json.encode(counted)

    async def count_text_tokens(self, text: str) -> int | None:
        """Count the tokens of a text with /tokenize."""
        fields = {"model": self._served, "prompt": text, "add_special_tokens": False}
        return await self._tokenize(msgspec.json.encode(fields))

    async def _tokenize(self, body: bytes) -> int | None:
        response = await self._post(self.root_path + b"/tokenize", body, MAX_TOKENIZED_BYTES)
        try:
            return None if response is None else _tokenized(response).count
        except UNREADABLE:  # the prompt is a list, or the server has no /tokenize
            return None

    async def token_counters(self) -> TokenCounters | None:
        """Read the token counters from /metrics."""
        metrics = await self._get(self.root_path + b"/metrics", MAX_METRICS_BYTES)
        return None if metrics is None else read_counters(metrics, self._served.encode())

    def body_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the request fields without the reserved ones, and with the gateway's cache salt and priority.

        If the router hands prompts over from one deployment to another, its `kv_transfer_params` are among them.
        """
        fields = super().body_fields(call)
        for name in self.reserved_fields:
            fields.pop(name, None)
        if not call.has_prefix:
            return fields
        if call.cache_salt:
            fields["cache_salt"] = _encoded(call.cache_salt)
        if self._sends_priority:
            fields["priority"] = self._priority(call)
        if call.kv_transfer is PREFILL:
            return prefill_fields(fields)
        if call.kv_transfer is not None:
            fields[FIELD] = call.kv_transfer
        return fields

    def native_fields(self, call: Call, native: NativeRequest) -> dict[str, msgspec.Raw]:
        """Return the fields of a passed request without the reserved ones, and with the gateway's salt and priority."""
        fields = super().native_fields(call, native)
        for name in self.reserved_fields:
            fields.pop(name, None)
        if call.cache_salt:
            fields["cache_salt"] = _encoded(call.cache_salt)
        if self._sends_priority:
            fields["priority"] = self._priority(call)
        return fields

    def _priority(self, call: Call) -> msgspec.Raw:
        """Return the call's priority on the server's scale. In vLLM and in the policy, the lowest number runs first."""
        return msgspec.Raw(b"%d" % call.latency_class.priority)


def read_counters(metrics: bytes, model: bytes) -> TokenCounters | None:
    """Read the token counters from Prometheus's text format, summed over ranks. Returns None if there are none.

    Ignores samples that are no token count, such as NaN. Counts only series whose model label is `model`, or all series
    if none has that label.
    """
    series = [
        (kind, labels, int(count))
        for kind, labels, value in _COUNTER.findall(metrics)
        if 0 <= (count := _number(value)) <= COUNT_MAX
    ]
    label = b'model_name="%b"' % model
    own = [one for one in series if label in one[1]] or series
    if not own:
        return None
    kinds = (b"prompt", b"generation", b"unwanted")
    return TokenCounters(*(sum(value for of, _, value in own if of == kind) for kind in kinds))


def _number(text: bytes) -> float:
    """The value of a sample. NaN, which no comparison accepts, if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


RECORD_MAX_SECONDS = 2.0  # total limit; short, because a client may wait for an error reply meanwhile
RECORD_WAITS_SECONDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # pauses before polls; the engine notices a disconnect late
PATIENT_MAX_SECONDS = 4.0  # total limit if no client waits; less than a shutdown waits for its last receipts
PATIENT_WAITS_SECONDS = (*RECORD_WAITS_SECONDS, 0.8, 1.6)


# Passed requests that the bundled engine computes like prompts, by their names.
_POOLED = frozenset({"rerank", "score", "v2/rerank"})
_TOKENIZED = frozenset({"tokenize", "detokenize"})  # passed requests that it computes in the turn of their salt


class Warmpath(VLLM):
    """Provider for the bundled engine: vLLM's API with deadlines and usage records.

    The engine's scheduler always supports priorities, and the lowest number runs first. The engine keeps a record of
    each call's usage for a while, so a call that ended early is billed by the engine's own count.
    """

    has_usage_records = True
    accepts_deadlines = True
    salts_counts = True

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._sends_priority = True

    def body_fields(self, call: Call) -> dict[str, msgspec.Raw]:
        """Return the request fields. A reasoning effort that is only a hint becomes an option of the chat template.

        The template may ignore the option. The engine rejects `reasoning_effort` if the template does not read it. It
        supports only one verbosity, so a verbosity that is only a hint is omitted.

        Embeddings, reranks and scores have a cache salt and a priority, too: the engine computes them with its prefix
        cache, in the same batches. With texts to tokenise, the salt only makes tenants take turns.
        """
        fields = super().body_fields(call)
        passed = None if call.passed is None else call.passed.name
        is_pooled = call.operation is Operation.EMBEDDING or passed in _POOLED
        if call.cache_salt and (is_pooled or passed in _TOKENIZED):
            fields["cache_salt"] = _encoded(call.cache_salt)
        if is_pooled:
            fields["priority"] = self._priority(call)
        if "verbosity" in call.hints:
            fields.pop("verbosity", None)
        if "reasoning_effort" in call.hints and (effort := fields.pop("reasoning_effort", None)) is not None:
            options = _options(fields.get("chat_template_kwargs", b"null")) or {}
            fields["chat_template_kwargs"] = msgspec.Raw(_encode({"reasoning_effort": effort, **options}))
        return fields

    async def recorded_usage(self, call_id: str, *, patient: bool = False) -> bytes | None:
        """Poll for the engine's record of a call. The engine writes it when it has noticed the disconnect."""
        path = b"%b/requests/%b" % (self.root_path, call_id.encode())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENT_MAX_SECONDS if patient else RECORD_MAX_SECONDS):
                for seconds in PATIENT_WAITS_SECONDS if patient else RECORD_WAITS_SECONDS:
                    await asyncio.sleep(seconds)
                    if (record := await self._get(path)) is not None:
                        return record
        return None
