"""Translates the log-probabilities of a chat answer to those of a response's text."""

from __future__ import annotations

from typing import Any

from gateway.endpoints.chat_answers import AssistantMessage, TokenLogprob, TopLogprob

Json = dict[str, Any]


def logprob_json(token: TokenLogprob, *, with_bytes: bool = False) -> Json:
    """Return a token's log-probability as JSON. Output items contain the token's bytes, and events do not."""
    top = [_token_json(candidate, with_bytes) for candidate in token.top_logprobs or ()]
    return {**_token_json(token, with_bytes), "top_logprobs": top}


def text_logprobs(message: AssistantMessage, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
    """Return the log-probabilities of the tokens in a complete answer's text.

    Engines also send log-probabilities for the tokens of reasoning and tool calls around the text. Returns an empty
    list if the text does not begin and end at a token boundary.
    """
    if not (message.has_reasoning or message.tool_calls):
        return logprobs
    text = (message.content or "").encode("utf-8", "surrogatepass")
    tokens = [_bytes(token) for token in logprobs]
    offsets = [0]  # where each token begins, and where the last one ends
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    at = b"".join(tokens).rfind(text)  # the last occurrence, because the reasoning before the text may quote it
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
