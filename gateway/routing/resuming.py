"""A stream that is cut goes on at another server, where the policy allows it (`continue_cut_streams`).

What the client has got is put behind the prompt, as the beginning of the answer: a last message of the assistant that
is to be continued, as vLLM and the bundled engine know it, or more text of a completion's prompt. What then comes is
made to look like the rest of the first answer: its id, no second role, one sum of usage. Its first event says that it
is not, under `warmpath`: a field that no client has to know, where comments trip some of them up.

Only text goes on. Not an answer that has thought, called a tool or given logprobs, or that was asked for as several, as
JSON or with tools: what a parser or a grammar was in the middle of, another server can not know. And it goes on once: a
request that two servers have broken off at may be the reason. Nor does it go on at a server that has died of it and
lives again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, UpstreamCut
from gateway.deployments.fleet import DeploymentState
from gateway.providers.base import Sink
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.partial_answer import PartialAnswer, ResumedAnswer
from gateway.routing.upstream import Upstream
from gateway.types import Call, Operation

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, where a completion sets no `max_tokens`

_LIMITS = ("max_tokens", "max_completion_tokens")
# Fields that say the same of the rest of an answer as of the whole; and those that do with these values only.
_RESUMABLE_FIELDS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", *_LIMITS, "temperature", "top_p", "top_k", "min_p",
     "seed", "stop", "stop_token_ids", "repetition_penalty", "logit_bias", "service_tier", "user", "safety_identifier",
     "prompt_cache_key", "cache_control", "metadata", "store"}
)  # fmt: skip
_RESUMABLE_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none",),
    "parallel_tool_calls": (False, True), "response_format": ({"type": "text"},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "echo": (False,), "suffix": (), "modalities": (["text"],),
    "ignore_eos": (False,), "skip_special_tokens": (True,),  # else there is more in an answer than its text
}  # fmt: skip
_fields = msgspec.json.Decoder(dict[str, Any]).decode
_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.encode

OpenNext = Callable[[Call], Coroutine[Any, Any, Upstream]]


def may_resume(call: Call) -> bool:
    """Whether its stream may go on elsewhere, by the policy and by what it asks for."""
    if not call.stream:
        return False
    model, limits = call.model, call.latency_class
    allowed = limits.continue_cut_streams if model.continue_cut_streams is None else model.continue_cut_streams
    return allowed and _requests_only_text(call)


def _requests_only_text(call: Call) -> bool:
    for name in call.fields.keys() - _RESUMABLE_FIELDS:
        value = msgspec.json.decode(call.fields[name])
        if value is not None and value not in _RESUMABLE_VALUES.get(name, ()):
            return False
    return call.operation is Operation.CHAT or bytes(call.fields.get("prompt", b"")).startswith(b'"')


class ResumedStream(Upstream):
    """An upstream that becomes another one when its stream is cut; to whoever reads it, one stream."""

    def __init__(
        self,
        begun: Upstream,
        call: Call,
        attempts: AttemptLog,
        deployments: Callable[[], Sequence[DeploymentState]],
        open_next: OpenNext,
    ) -> None:
        """`deployments` may go on with it."""
        super().__init__(
            call, begun.chosen, begun.sent, begun.reply, begun.first_chunk_bytes, attempts.task, begun._quarantine
        )
        self._attempts = attempts
        self._deployments = deployments
        self._open_next = open_next
        self._partial = PartialAnswer()
        self._partial.add(begun.first_chunk_bytes)
        self._rest: ResumedAnswer | None = None
        self._is_closed = False

    @property
    def is_estimated(self) -> bool:
        return self._rest is not None and not self._rest.is_exact

    def merge_usage(self, record: bytes) -> bytes:
        if self._rest is None:
            return record
        told = _fields(record)
        if isinstance(usage := told.get("usage"), dict):
            told["usage"] = self._rest.merge_usage(usage)
        return _encode(told)

    def completed(self) -> None:
        """That the rest came from another server acquits nobody: it was another request."""
        if self._rest is None:
            super().completed()
        else:
            self.deployment.breaker.completed()

    async def stream_to(self, sink: Sink) -> bool:
        try:
            return await super().stream_to(self._recording(sink))
        except UpstreamCut as cut:
            if self.fault is None or self._rest is not None:  # not the server's fault; or it has gone on before
                raise
            rest = await self._resume(cut)
        begun = rest.rewrite(self.first_chunk_bytes)
        return (not begun or sink(begun)) and await self.stream_to(sink)

    def _recording(self, sink: Sink) -> Sink:
        partial, rest = self._partial, self._rest

        def record(chunk: bytes) -> bool:
            partial.add(chunk)
            return sink(chunk)

        def rewrite(chunk: bytes) -> bool:
            assert rest is not None
            rewritten = rest.rewrite(chunk)
            return not rewritten or sink(rewritten)

        return record if rest is None else rewrite

    async def _resume(self, cut: UpstreamCut) -> ResumedAnswer:
        """Become the server at which the answer goes on. Raises `cut` where there is none."""
        loop, partial, attempts = asyncio.get_running_loop(), self._partial, self._attempts
        deployments = self._deployments()
        others = [deployment for deployment in deployments if deployment is not self.deployment] or (
            [] if self.caused_crash else deployments
        )
        text = partial.text
        if not text or not partial.plain or not others or loop.time() >= self._call.deadline:
            raise cut
        # Templates may take away the space behind it, and mostly it is a part of the next token.
        goes_on_from = text.rstrip() or text
        call = continuation_call(self._call, goes_on_from, partial.output_tokens, others)
        if call is None:
            raise cut
        assert self.fault is not None
        attempts.conclude(self.fault.value)
        await self._leave()
        last_deployment = attempts.last_deployment
        with_counts = self.deployment.config.continuous_usage or call.continuous_usage
        rest = self._rest = ResumedAnswer(partial, overlap=text[len(goes_on_from) :], with_counts=with_counts)
        try:
            upstream = await self._open_next(call)
        except GatewayError:
            self._rest, attempts.last_deployment = None, last_deployment  # who has worked on what there is
            raise cut from None
        self._switch_to(upstream)
        rest.deployment = self.deployment.name
        attempts.mark_continues()
        return rest

    def _switch_to(self, other: Upstream) -> None:
        self.reply, self.sent, self.chosen, self.deployment = other.reply, other.sent, other.chosen, other.deployment
        self.matched_tokens, self.first_chunk_bytes = other.matched_tokens, other.first_chunk_bytes
        self.fault, self._is_closed = None, False

    async def _leave(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await super()._leave()


def continuation_call(call: Call, text: str, output_tokens: int, deployments: Sequence[DeploymentState]) -> Call | None:
    """The request that continues the answer at one of `deployments`; None if no output is left.

    A pause in the middle of an answer may be as long as the class allows."""
    fields, limits = dict(call.fields), call.latency_class
    for name in _LIMITS:
        limit = msgspec.json.decode(fields[name]) if name in fields else None
        if limit is None and name == "max_tokens" and call.operation is Operation.COMPLETION:
            limit = DEFAULT_COMPLETION_TOKENS
        if limit is not None:
            if limit <= output_tokens:
                return None
            fields[name] = _raw(limit - output_tokens)
    if call.operation is Operation.CHAT:
        said = _raw({"role": "assistant", "content": text})
        fields["messages"] = _raw([*_messages(fields["messages"]), said])
        fields |= {"add_generation_prompt": _raw(False), "continue_final_message": _raw(True)}
    else:
        fields["prompt"] = _raw(msgspec.json.decode(fields["prompt"]) + text)
    names = tuple(deployment.name for deployment in deployments)
    return msgspec.structs.replace(
        call,
        fields=fields,
        model=call.model.model_copy(update={"deployments": names, "fallbacks": ()}),
        latency_class=limits.model_copy(update={"ttft": min(limits.ttft, limits.inter_token)}),
    )


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
