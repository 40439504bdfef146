"""Log-probabilities of a response's text, which are some of those of a chat's answer."""

from __future__ import annotations

from typing import Any

from gateway.endpoints.chat_answers import Candidate, Said, TokenLogprob

Json = dict[str, Any]


def told(token: TokenLogprob, *, with_bytes: bool = False) -> Json:
    """As an item has it, or without its bytes, as events do."""
    top = [_candidate(candidate, with_bytes) for candidate in token.top_logprobs or ()]
    return {**_candidate(token, with_bytes), "top_logprobs": top}


def of_text(message: Said, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
    """Those of a whole answer's text: its tokens may also be those of reasoning and calls, around it.

    None where the text does not begin and end with a token.
    """
    if not (message.thinks or message.tool_calls):
        return logprobs
    text = (message.content or "").encode("utf-8", "surrogatepass")
    tokens = [_bytes(token) for token in logprobs]
    begins = [0]
    for token in tokens:
        begins.append(begins[-1] + len(token))
    at = b"".join(tokens).rfind(text)
    if not text or at not in begins or at + len(text) not in begins:
        return []
    return logprobs[begins.index(at) : begins.index(at + len(text))]


def _candidate(candidate: Candidate, with_bytes: bool) -> Json:
    known: Json = {"token": candidate.token, "logprob": candidate.logprob}
    return {**known, "bytes": [*_bytes(candidate)]} if with_bytes else known


def _bytes(candidate: Candidate) -> bytes:
    if candidate.bytes is None:
        return candidate.token.encode("utf-8", "surrogatepass")
    return bytes(candidate.bytes)
