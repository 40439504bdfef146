"""Which top-level fields of a chat can be translated to Anthropic's Messages API, and how a field is decoded.

A field that this module does not know is rejected. The Messages API itself rejects unknown fields. In addition, it has
fields that clients must not set, because they name another workspace or container, or a speed with a separate price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

Fields = Mapping[str, msgspec.Raw]
Value = TypeVar("Value")

TEMPERATURE_MAX = 1.0
# Fields that are translated, and fields of the Messages API that a client may set.
_TRANSLATED = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens",
     "stream", "stop", "temperature", "top_p", "reasoning_effort", "response_format", "service_tier", "user",
     "safety_identifier", "prompt_cache_options", "top_k", "thinking", "cache_control", "chat_template_kwargs"}
)  # fmt: skip
# Fields that are dropped. Either no answer depends on the field, or the Messages API does what the field requests
# anyway: it always continues an assistant message at the end.
_IGNORED = frozenset(
    {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "stream_options", "add_generation_prompt",
     "continue_final_message"}
)  # fmt: skip
# Fields that have no effect with these values. With other values they request what the Messages API does not support.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "frequency_penalty": (0,),
    "presence_penalty": (0,), "modalities": (["text"],), "store": (False,), "verbosity": ("medium",),
    "functions": ([],), "function_call": ("none", "auto"),
}  # fmt: skip


class UnsupportedField(Exception):
    """The call has a field or value that cannot be translated. `param` is its path, for example `tools[0].type`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


def field_decoder(kind: type[Value] | Any) -> Callable[[msgspec.Raw], Any]:
    """Return a decoder for a field whose value is of this type or null."""
    return msgspec.json.Decoder(kind | None).decode


def read_field(fields: Fields, name: str, decode: Callable[[msgspec.Raw], Any]) -> Any:
    """Return a field's value, or None if it is missing. Raises `UnsupportedField` if the value has the wrong type."""
    if name not in fields:
        return None
    try:
        return decode(fields[name])
    except msgspec.ValidationError as problem:
        message, _, path = str(problem).partition(" - at `$")
        raise UnsupportedField(message, f"{name}{path.rstrip('`')}") from None


_temperature = field_decoder(float)
_type = field_decoder(dict[str, Any])


def check_fields(fields: Fields) -> None:
    """Raise `UnsupportedField` for the first top-level field that cannot be translated."""
    for name in fields.keys() - _TRANSLATED - _IGNORED:
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in _NEUTRAL.get(name, ()):
            what = "this value is not supported" if name in _NEUTRAL else "this field is not supported"
            raise UnsupportedField(f"{what} by this model's server, which speaks Anthropic's Messages API", name)
    temperature = read_field(fields, "temperature", _temperature)
    if temperature is not None and not 0 <= temperature <= TEMPERATURE_MAX:
        raise UnsupportedField(f"this model's server supports 0 to {TEMPERATURE_MAX:g}", "temperature")
    form = read_field(fields, "response_format", _type)
    if form is not None and form.get("type") not in ("text", "json_schema"):
        raise UnsupportedField("this model's server supports only text and json_schema", "response_format.type")
