"""POST /v1/completions: a prompt as text or as token ids, one or several."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.endpoints.base import NativeEndpoint
from gateway.prompts.reader import Choices, CommonFields, Fields, ParsedBody, TokenCount, decode
from gateway.types import Operation

Prompt = str | list[str | int | list[int]]


class CompletionBody(CommonFields, kw_only=True):
    prompt: Prompt | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    max_tokens: TokenCount | None = None


_decoder = msgspec.json.Decoder(CompletionBody)
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


class CompletionEndpoint(NativeEndpoint):
    path: ClassVar[str] = Operation.COMPLETION.value
    operation: ClassVar[Operation] = Operation.COMPLETION

    def read(self, fields: Fields, body: bytes) -> ParsedBody:
        completion = decode(_decoder, body)
        pieces, tokens = prompt_pieces(completion.prompt)
        max_tokens = DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
        return ParsedBody(
            common=completion,
            fields=fields,
            pieces=pieces,
            max_output_tokens=max_tokens,
            choices=max(completion.n or 1, completion.best_of or 1) * _prompts(completion.prompt),
            deterministic=completion.temperature == 0 or completion.seed is not None,
            prompt_tokens=tokens,
        )


def prompt_pieces(prompt: Prompt | None) -> tuple[tuple[bytes, ...], int | None]:
    """The prompt's bytes, and its length in tokens where it came as token ids (four bytes each)."""
    if prompt is None:
        return (), None
    if isinstance(prompt, str):
        return (prompt.encode("utf-8", "surrogatepass"),), None
    ids = [i for item in prompt for i in (item if isinstance(item, list) else [item]) if isinstance(i, int)]
    if ids:
        return (b"".join(i.to_bytes(4, "little", signed=False) for i in ids if 0 <= i < 2**32),), len(ids)
    return tuple(item.encode("utf-8", "surrogatepass") for item in prompt if isinstance(item, str)), None


def _prompts(prompt: Prompt | None) -> int:
    """How many prompts one body holds: a list of token ids is one prompt, a list of anything else is several."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
