"""Log-probabilities of a response's text, selected and rendered from those of a chat's answer."""

from __future__ import annotations

from typing import Any

from gateway.endpoints.chat_answers import AssistantMessage, TokenLogprob, TopLogprob

Json = dict[str, Any]


def logprob_json(token: TokenLogprob, *, with_bytes: bool = False) -> Json:
    """Return a token's log-probability as in an output item (with bytes), or as in an event (without)."""
    top = [_token_json(candidate, with_bytes) for candidate in token.top_logprobs or ()]
    return {**_token_json(token, with_bytes), "top_logprobs": top}


def text_logprobs(message: AssistantMessage, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
    """Return those of a whole answer's text.

    Engines also send them for the tokens of reasoning and tool calls around it. Returns none if the text does not begin
    and end at the border of a token.
    """
    if not (message.has_reasoning or message.tool_calls):
        return logprobs
    text = (message.content or "").encode("utf-8", "surrogatepass")
    tokens = [_bytes(token) for token in logprobs]
    offsets = [0]  # where each token begins, and where the last one ends
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    at = b"".join(tokens).rfind(text)  # the last occurrence: reasoning may quote the text before
    if not text or at not in offsets or at + len(text) not in offsets:
        return []
    return logprobs[offsets.index(at) : offsets.index(at + len(text))]


def _token_json(candidate: TopLogprob, with_bytes: bool) -> Json:
    token: Json = {"token": candidate.token, "logprob": candidate.logprob}
    return {**token, "bytes": [*_bytes(candidate)]} if with_bytes else token


def _bytes(candidate: TopLogprob) -> bytes:
    if candidate.bytes is None:
        return candidate.token.encode("utf-8", "surrogatepass")
    return bytes(candidate.bytes)
