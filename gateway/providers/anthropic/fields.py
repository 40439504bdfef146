"""Which of a chat's top-level fields Anthropic's Messages can honour, and how a field is read.

A field that is not known here is refused rather than passed on. Messages refuse unknown fields, too, and some of those
that they do know are not a client's to set: they name another workspace, another container, or a speed with a price of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

Fields = Mapping[str, msgspec.Raw]
Value = TypeVar("Value")

TEMPERATURE_MAX = 1.0
# Those that are rendered; of Messages' own fields, those that a client may set.
_SAID = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens",
     "stream", "stop", "temperature", "top_p", "reasoning_effort", "response_format", "service_tier", "user",
     "safety_identifier", "prompt_cache_options", "top_k", "thinking", "cache_control", "chat_template_kwargs"}
)  # fmt: skip
# Those that no answer depends on; and those by which others are told to go on with a last message of the assistant, as
# Messages do anyway.
_LEFT_OUT = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "stream_options", "add_generation_prompt",
     "continue_final_message"}
)  # fmt: skip
# Those that ask for nothing with these values; with others, for what Messages do not have.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "frequency_penalty": (0,),
    "presence_penalty": (0,), "modalities": (["text"],), "store": (False,), "verbosity": ("medium",),
    "functions": ([],), "function_call": ("none", "auto"),
}  # fmt: skip


class UnsupportedField(Exception):
    """A call that Messages have no words for. `param` is the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def reads(kind: type[Value] | Any) -> Callable[[msgspec.Raw], Any]:
    """Reads a field of this type, or null."""
    return msgspec.json.Decoder(kind | None).decode


def read(fields: Fields, name: str, decode: Callable[[msgspec.Raw], Any]) -> Any:
    """A field's value; None where it is not given. Raises `UnsupportedField` where it is of another type."""
    if name not in fields:
        return None
    try:
        return decode(fields[name])
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at `$")
        raise UnsupportedField(message, f"{name}{path.rstrip('`')}") from None


_temperature = reads(float)
_type = reads(dict[str, Any])


def check(fields: Fields) -> None:
    """Raises `UnsupportedField` for the first field that can not be honoured."""
    for name in fields.keys() - _SAID - _LEFT_OUT:
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in _NEUTRAL.get(name, ()):
            what = "this value can not be honoured" if name in _NEUTRAL else "is not known"
            raise UnsupportedField(f"{what} by the server of this model, which speaks Anthropic's Messages", name)
    temperature = read(fields, "temperature", _temperature)
    if temperature is not None and not 0 <= temperature <= TEMPERATURE_MAX:
        raise UnsupportedField(f"the server of this model takes 0 to {TEMPERATURE_MAX:g}", "temperature")
    form = read(fields, "response_format", _type)
    if form is not None and form.get("type") not in ("text", "json_schema"):
        raise UnsupportedField("the server of this model takes text and json_schema", "response_format.type")
