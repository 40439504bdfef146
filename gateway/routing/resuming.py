"""Resumes a cut stream on another deployment, unless the policy forbids it (`continue_cut_streams`).

Other deployments of the model are tried first, then those of its fallbacks. A deployment may resume its own stream if
there is no other one, and if it neither crashed nor stalled.

The text that the client has received is appended to the prompt, as the beginning of the answer: in a chat as a last
assistant message to be continued, which vLLM and the bundled engine support, in a completion as more prompt text. The
second deployment's output is rewritten to look like the rest of the first answer (`partial_answer.py`): same id, no
second role, one sum of usage. Its first event carries a `warmpath` field that says where the stream was resumed. It is
a field because comments in a stream confuse some clients.

Only text is resumed. A stream is not resumed if its answer contains reasoning, tool calls or logprobs, or if the
request asks for several choices, JSON or tools: another deployment cannot restore the state of a parser or a grammar. A
stream is resumed once at most, because a request at which two deployments broke off may be the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, UpstreamCut, UpstreamRefused
from gateway.deployments.state import DeploymentState
from gateway.policy import FallbacksWhen
from gateway.providers.base import Fault, Sink
from gateway.providers.text_events import TextSink
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.partial_answer import PartialAnswer, ResumedAnswer
from gateway.routing.upstream import Upstream
from gateway.types import Call, Operation, Usage

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for a completion without `max_tokens`

_LIMITS = ("max_tokens", "max_completion_tokens")
# A request is resumable only if each of its fields means the same for the rest of an answer as for the whole: the
# fields of the first table with any value, those of the second with these values. Unknown fields are not.
_RESUMABLE_FIELDS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", *_LIMITS, "temperature", "top_p", "top_k", "min_p",
     "seed", "stop", "stop_token_ids", "repetition_penalty", "logit_bias", "service_tier", "user", "safety_identifier",
     "prompt_cache_key", "cache_control", "metadata", "store"}
)  # fmt: skip
_RESUMABLE_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none",),
    "parallel_tool_calls": (False, True), "response_format": ({"type": "text"},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "echo": (False,), "suffix": (), "modalities": (["text"],),
    "ignore_eos": (False,), "skip_special_tokens": (True,),  # otherwise an answer is more than its text
}  # fmt: skip
_fields = msgspec.json.Decoder(dict[str, Any]).decode
_messages = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.encode

OpenNext = Callable[[Call], Coroutine[Any, Any, Upstream]]


def may_resume(call: Call) -> bool:
    """Whether the call's stream may be resumed: the policy allows it, and the request asks for text only."""
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
    """An upstream that switches to another deployment when its stream is cut. Its reader sees one stream."""

    def __init__(
        self,
        first: Upstream,
        call: Call,
        attempts: AttemptLog,
        deployments: Sequence[DeploymentState],
        open_next: OpenNext,
    ) -> None:
        """`deployments` are those that may answer the call; `open_next` opens one that is not rejected."""
        super().__init__(
            call, first.chosen, first.sent, first.response, first.first_chunk_bytes, attempts, first._quarantine
        )
        self.on_released = first.on_released
        self._attempts = attempts
        self._deployments = deployments
        self._open_next = open_next
        self._partial = PartialAnswer(first.deployment.token_rates.tokens_per_byte)
        self._partial.add(first.first_chunk_bytes)
        self._resumed: ResumedAnswer | None = None
        self._is_closed = False

    @property
    def is_estimated(self) -> bool:
        return self._resumed is not None and not self._resumed.is_exact

    def merge_usage(self, record: bytes) -> bytes:
        if self._resumed is None:
            return record
        try:
            parsed = _fields(record)
            if isinstance(usage := parsed.get("usage"), dict):
                parsed["usage"] = self._resumed.merge_usage(usage)
            return _encode(parsed)
        except (msgspec.MsgspecError, OverflowError):
            return record  # metering rejects it

    def completed(self) -> None:
        """The stream is complete.

        A resumed one does not remove the request's strikes, because it was a different request.
        """
        if self._resumed is None:
            super().completed()
        else:
            self.deployment.breaker.completed()

    async def stream_to(self, sink: Sink, text_sink: TextSink | None = None) -> bool:
        try:
            return await super().stream_to(self._recording(sink), self._recording_text(text_sink))
        except UpstreamCut as cut:
            if self.fault is None or self._resumed is not None:  # not the deployment's fault, or resumed before
                raise
            resumed = await self._resume(cut)
        first = resumed.rewrite(self.first_chunk_bytes)
        return (not first or sink(first)) and await self.stream_to(sink, text_sink)

    def _recording(self, sink: Sink) -> Sink:
        partial, resumed = self._partial, self._resumed

        def record(chunk: bytes) -> bool:
            partial.add(chunk)
            return sink(chunk)

        def rewrite(chunk: bytes) -> bool:
            assert resumed is not None
            rewritten = resumed.rewrite(chunk)
            return not rewritten or sink(rewritten)

        return record if resumed is None else rewrite

    def _recording_text(self, text_sink: TextSink | None) -> TextSink | None:
        """As `_recording`. None if the chunks are rewritten."""
        if text_sink is None or self._resumed is not None:
            return None
        partial = self._partial

        def record_text(chunk: bytes, events: int) -> bool:
            partial.add(chunk)
            return text_sink.take(chunk, events)

        if text_sink.direct is not None:
            text_sink.direct.note_text = partial.add
        return TextSink(record_text, text_sink.direct)

    async def _resume(self, cut: UpstreamCut) -> ResumedAnswer:
        """Switch to a deployment that resumes the answer. Raises `cut` if there is none."""
        loop, partial, attempts = self._loop, self._partial, self._attempts
        capable = [deployment for deployment in self._deployments if can_continue(deployment, self._call)]
        candidates = [deployment for deployment in capable if deployment is not self.deployment]
        if not candidates and not self.caused_crash and self.fault is not Fault.TIMEOUT:
            candidates = capable  # it may resume its own stream, unless it crashed or stalled
        text = partial.text
        if not text or not partial.resumable or not candidates or loop.time() >= self._call.deadline:
            raise cut
        # Chat templates may strip trailing whitespace, and it is usually a part of the next token. So the prompt ends
        # before it, and the whitespace that the model writes again is dropped from the resumed stream (`overlap`).
        resume_text = text.rstrip() or text
        call = continuation_call(self._call, resume_text, partial.output_tokens)
        if call is None:
            raise cut
        assert self.fault is not None
        attempts.rejected_at.update(one.name for one in self._deployments if one not in candidates)
        attempts.conclude(self.fault.value)
        cut_attempt = len(attempts.done) - 1
        received = Usage(input_uncached=self._call.input_tokens_estimate, output=partial.output_tokens)
        await self._release()
        last_deployment = attempts.last_deployment
        usage_in_chunks = self.deployment.config.continuous_usage or call.continuous_usage
        resumed = self._resumed = ResumedAnswer(
            partial, overlap=text[len(resume_text) :], usage_in_chunks=usage_in_chunks
        )
        try:
            upstream = await self._open_any(call)
        except GatewayError:
            self._resumed, attempts.last_deployment = None, last_deployment  # which computed what the client has
            raise cut from None
        self._switch_to(upstream)
        resumed.deployment = self.deployment.name
        attempts.mark_continues(cut_attempt, received)
        return resumed

    async def _open_any(self, call: Call) -> Upstream:
        """Open the continuation. A deployment that rejects it may not support it, so the next one is tried."""
        while True:
            try:
                return await self._open_next(call)
            except UpstreamRefused:
                rejected = self._attempts.done[-1].deployment
                if rejected in self._attempts.rejected_at:
                    raise
                self._attempts.rejected_at.add(rejected)

    def _switch_to(self, other: Upstream) -> None:
        self.response, self.sent, self.chosen, self.deployment = (
            other.response,
            other.sent,
            other.chosen,
            other.deployment,
        )
        self.matched_tokens, self.first_chunk_bytes = other.matched_tokens, other.first_chunk_bytes
        self.on_released, self.fault, self._is_closed = other.on_released, None, False

    async def _release(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await super()._release()


def can_continue(deployment: DeploymentState, call: Call) -> bool:
    """Whether a deployment can continue an answer to this call that another one began."""
    return call.operation is Operation.COMPLETION or deployment.provider.continues_final_message


def continuation_call(call: Call, text: str, output_tokens: int) -> Call | None:
    """The request that continues the answer; None if the token limit leaves no output.

    The wait for its first chunk is a pause within an answer, so `inter_token` bounds it.
    """
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
        partial_message = _raw({"role": "assistant", "content": text})
        fields["messages"] = _raw([*_messages(fields["messages"]), partial_message])
        fields |= {"add_generation_prompt": _raw(False), "continue_final_message": _raw(True)}
    else:
        fields["prompt"] = _raw(msgspec.json.decode(fields["prompt"]) + text)
    return msgspec.structs.replace(
        call,
        fields=fields,
        model=call.model.model_copy(update={"fallbacks_when": FallbacksWhen()}),
        latency_class=limits.model_copy(update={"ttft": min(limits.ttft, limits.inter_token)}),
    )


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
