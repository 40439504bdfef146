"""The server-sent events of one streamed chat: converts the deltas of its choices to OpenAI's chunks.

Almost all deltas of a long answer are content without anything else. Their events differ in the text only, so they are
made of bytes that are encoded once (`TextEvent`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.parsers.base import ContentText
from backend.server import responses
from backend.server.choices import ChatChoice
from backend.server.requests import ChatRequest
from backend.server.responses import Envelope, Json, TextEvent
from backend.server.sequence import ChoiceDelta
from backend.server.tokenizer import TextCodec


class ChatStream:
    """Makes the events of one stream. `usage` returns the usage up to now, for the requests that want it.

    `extra` contains fields of the first chunk of each choice.
    """

    def __init__(
        self,
        envelope: Envelope,
        request: ChatRequest,
        choices: Sequence[ChatChoice],
        codec: TextCodec,
        usage: Callable[[], Json],
        extra: Json,
    ) -> None:
        self._envelope = envelope
        self._request = request
        self._choices = choices
        self._codec = codec
        self._usage = usage
        self._has_only_text = not (request.logprobs or request.return_token_ids or request.continuous_usage)
        self._content_events = [TextEvent(self._content_payload(i)) for i in range(len(choices))]
        self._opening = b"".join(  # precedes the first delta
            self._chunk(responses.chat_delta(i, {"role": "assistant", "content": ""}), extra)
            for i in range(len(choices))
        )

    def events(self, delta: ChoiceDelta) -> bytes:
        """Returns the events of a delta. Empty if it has nothing to show yet."""
        opening, self._opening = self._opening, b""
        if self._has_only_text and delta.finish_reason is None and len(delta.events) == 1:
            only = delta.events[0]
            if type(only) is ContentText:
                return opening + self._content_events[delta.index](only.text)
        return opening + self._other_events(delta)

    def closing(self) -> bytes:
        """Returns the events after the last delta."""
        usage = b""
        if self._request.include_usage:
            usage = responses.event(self._envelope.wrap([], self._usage(), with_usage=True))
        return usage + responses.DONE

    def _other_events(self, delta: ChoiceDelta) -> bytes:
        choice = self._choices[delta.index]
        bodies = choice.take(delta)
        token_ids = responses.token_ids([delta]) if self._request.return_token_ids else {}
        if not bodies and (delta.logprobs or (token_ids and delta.token_ids)):
            bodies = [{"content": ""}]
        frames = b""
        for i, body in enumerate(bodies):
            # A delta can become several chunks. The first one contains the delta's tokens and log-probabilities.
            logprobs = responses.requested_logprobs(self._codec, self._request, [delta]) if i == 0 else None
            frames += self._chunk(responses.chat_delta(delta.index, body, logprobs) | (token_ids if i == 0 else {}))
        if delta.finish_reason:
            reason = choice.finish_reason(delta.finish_reason)
            ending = responses.chat_delta(delta.index, {}, finish_reason=reason) | responses.stop_reason(delta)
            frames += self._chunk(ending)
        return frames

    def _content_payload(self, index: int) -> Callable[[str], Json]:
        return lambda text: self._payload(responses.chat_delta(index, {"content": text}))

    def _chunk(self, choice: Json, extra: Json | None = None) -> bytes:
        return responses.event(self._payload(choice, extra))

    def _payload(self, choice: Json, extra: Json | None = None) -> Json:
        usage = self._usage() if self._request.continuous_usage else None
        return self._envelope.wrap([choice], usage, with_usage=self._request.include_usage, extra=extra)
