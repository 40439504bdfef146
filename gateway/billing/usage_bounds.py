"""Bounds of what a deployment can have consumed for one call. Counts above them are implausible and are not billed.

A reply's counts are checked before they are billed, and before anything learns from them. If one count fails, no count
of that reply is used: the call is billed by the gateway's own estimate, and its receipt says why (`implausible`). The
bounds must hold for every honest server, so they are wide. They are meant for absurd counts and not for a careful lie.

  count                  bound                            reason
  each                   0..2**53-1                       a count is not negative, and JSON is not exact above
  parts of a sum         the sum                          for example, cached tokens are a part of the prompt's tokens
  prompt                 the body's bytes                 tokenizers make at most about one token of a byte. Templates
                                                          may escape a character as `\\uXXXX`, which has three times as
                                                          many bytes: bytes above 127 count three times
                         + `media_tokens_bound`           media has more tokens than bytes, or is only linked
                         + `added_prompt_tokens`          chat template, tool preamble, a vendor's own system prompt
                         all that, for each choice        some servers count the prompt once per choice
  visible output         `max_tokens` for each choice,    the client's own bound. Some servers ignore it, and what has
                         or the bytes of text received    arrived was generated: a visible token has a byte at least
                         + `SLACK_TOKENS` per choice      some engines count the token that ends an answer
  output with reasoning  the same, or the received bytes  hidden reasoning arrives in no bytes, and some vendors do not
                         + `HIDDEN_TOKENS` per choice     count it towards `max_tokens`

If the request lets the server add text of its own, such as search results, only `CONTEXT_TOKENS` bounds the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.policy.deployments import ADDED_PROMPT_TOKENS
from gateway.providers.usage import ReportedUsage
from gateway.types import Call, Operation

CONTEXT_TOKENS = 2**24  # 16.8 million; the longest context that a model is published with has ten million tokens
HIDDEN_TOKENS = 2**19  # per choice; four times the longest output that a vendor's model may have, which is 128k
SLACK_TOKENS = 16  # per choice
NON_ASCII_FACTOR = 3  # `é` has 2 bytes, `\u00e9` has 6
# Crash recovery knows only the estimate, a quarter of the prompt's bytes: what the bytes could be at most.
ESTIMATE_FACTOR = 4 * NON_ASCII_FACTOR
QUICK_FACTOR = 2  # a prompt up to this multiple of its estimate needs no closer look

_ASCII = bytes(range(128))
# Fields with which a client lets the server put text into the prompt: OpenAI, OpenRouter, xAI, DashScope, Azure.
_ADDING_FIELDS = frozenset(
    {"web_search_options", "plugins", "search_parameters", "enable_search", "search_options", "data_sources"}
)
_PLAIN_TOOLS = frozenset({"function", "custom"})  # whose definitions are in the body; servers run the others


class _Tool(msgspec.Struct):
    type: str = "function"


_tools = msgspec.json.Decoder(list[_Tool] | None).decode
_choices = msgspec.json.Decoder(int | None).decode


def find_implausible(
    call: Call,
    reported: ReportedUsage,
    *,
    received_tokens: Callable[[], int],
    added_prompt_tokens: int = ADDED_PROMPT_TOKENS,
) -> str | None:
    """Say which of a reply's counts is impossible for the call, and which bound it exceeds. None if all are possible.

    `received_tokens` returns the most tokens that the received text can have. It is called only if the output is large.
    `added_prompt_tokens` is the deployment's.
    """
    if (contradiction := reported.contradiction()) is not None:
        return contradiction
    if not is_plausible_prompt(call, reported.prompt, added_prompt_tokens):
        return f"a prompt of {reported.prompt} tokens is above {max_prompt_tokens(call, added_prompt_tokens)}"
    visible, limit = reported.output - reported.reasoning - reported.remainder, call.max_output_tokens
    if (limit is None or visible <= limit) and reported.output <= HIDDEN_TOKENS:
        return None
    choices, received = _choices_of(call), received_tokens()
    if limit is not None and visible > (bound := max(limit, received) + SLACK_TOKENS * choices):
        return f"an output of {visible} tokens is above {bound}, by max_tokens and the received text"
    hidden = 0 if call.operation is Operation.EMBEDDING else HIDDEN_TOKENS
    if reported.output > (bound := received + max(hidden, SLACK_TOKENS) * choices):
        return f"an output of {reported.output} tokens is above {bound}, by the received text and hidden reasoning"
    return None


def is_plausible_prompt(call: Call, tokens: int, added_prompt_tokens: int = ADDED_PROMPT_TOKENS) -> bool:
    """Whether the call's prompt can have so many tokens."""
    if 0 <= tokens <= QUICK_FACTOR * call.prompt_tokens_estimate:
        return True
    return 0 <= tokens <= max_prompt_tokens(call, added_prompt_tokens)


def max_prompt_tokens(call: Call, added_prompt_tokens: int = ADDED_PROMPT_TOKENS) -> int:
    """Return the most tokens that the call's prompt can have. Reads the whole body, so it takes milliseconds per MB."""
    if not call.fields:  # rebuilt by crash recovery
        return ESTIMATE_FACTOR * call.prompt_tokens_estimate + added_prompt_tokens
    if _server_adds_text(call):
        return CONTEXT_TOKENS
    tokens = call.media_tokens_bound + sum(_rendered_bytes(bytes(value)) for value in call.fields.values())
    return tokens * _choices_of(call) + added_prompt_tokens


def _rendered_bytes(value: bytes) -> int:
    """The bytes of a value if a template escapes every character that is not ASCII."""
    if value.isascii():
        return len(value)
    return len(value) + (NON_ASCII_FACTOR - 1) * len(value.translate(None, _ASCII))


def _server_adds_text(call: Call) -> bool:
    if call.native is not None and call.native.refusal is not None:  # it may name files, and tools of the vendor
        return True
    if not _ADDING_FIELDS.isdisjoint(call.fields):
        return True
    if "tools" not in call.fields:
        return False
    try:
        return any(tool.type not in _PLAIN_TOOLS for tool in _tools(call.fields["tools"]) or ())
    except (msgspec.MsgspecError, RecursionError):
        return False


def _choices_of(call: Call) -> int:
    """The number of choices, for the allowances that each choice has."""
    try:
        return max(_choices(call.fields["n"]) or 1, 1) if "n" in call.fields else 1
    except msgspec.MsgspecError:
        return 1
