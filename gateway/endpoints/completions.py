"""POST /v1/completions: completes one or several prompts, each given as text or as token ids."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.endpoints.base import NativeEndpoint
from gateway.prompts.reader import Choices, CommonFields, Fields, ParsedBody, TokenCount, decode
from gateway.types import Operation

Prompt = str | list[str | int | list[int]]


class CompletionBody(CommonFields, kw_only=True):
    """The fields of a completion request that the gateway acts on."""

    prompt: Prompt | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    max_tokens: TokenCount | None = None


_decoder = msgspec.json.Decoder(CompletionBody)
DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint


class CompletionEndpoint(NativeEndpoint):
    """POST /v1/completions."""

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
            choices=max(completion.n or 1, completion.best_of or 1) * _prompt_count(completion.prompt),
            deterministic=completion.temperature == 0 or completion.seed is not None,
            prompt_tokens=tokens,
        )


def prompt_pieces(prompt: Prompt | None) -> tuple[tuple[bytes, ...], int | None]:
    """Return the pieces of a prompt, and the prompt's token count if it is known.

    The token count is known only for a prompt of token ids. Each token id becomes four bytes.
    """
    if prompt is None:
        return (), None
    if isinstance(prompt, str):
        return (prompt.encode("utf-8", "surrogatepass"),), None
    # Token ids out of range are skipped here, because the deployment rejects them.
    ids = [i for item in prompt for i in (item if isinstance(item, list) else [item]) if isinstance(i, int)]
    if ids:
        return (b"".join(i.to_bytes(4, "little", signed=False) for i in ids if 0 <= i < 2**32),), len(ids)
    return tuple(item.encode("utf-8", "surrogatepass") for item in prompt if isinstance(item, str)), None


def _prompt_count(prompt: Prompt | None) -> int:
    """Count the prompts of a body. A list of token ids is one prompt; any other list has one prompt per item."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
