"""Which top-level fields of a chat can be translated to Anthropic's Messages API.

A field that this module does not know is rejected. The Messages API itself rejects unknown fields. In addition, it has
fields that clients must not set, because they name another workspace or container, or a speed with a separate price.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.providers.translation import Fields, FieldTable, UnsupportedField, field_decoder, read_field

API = "Anthropic's Messages API"
TEMPERATURE_MAX = 1.0
FIELDS = FieldTable(
    API,
    # Fields that are translated, and fields of the Messages API that a client may set.
    translated=frozenset(
        {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens",
         "stream", "stop", "temperature", "top_p", "reasoning_effort", "response_format", "service_tier", "user",
         "safety_identifier", "prompt_cache_options", "top_k", "thinking", "cache_control", "chat_template_kwargs"}
    ),
    # The Messages API always continues an assistant message at the end.
    ignored=frozenset(
        {"metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "stream_options",
         "add_generation_prompt", "continue_final_message"}
    ),
    neutral={
        "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "frequency_penalty": (0,),
        "presence_penalty": (0,), "modalities": (["text"],), "store": (False,), "verbosity": ("medium",),
        "functions": ([],), "function_call": ("none", "auto"),
    },
)  # fmt: skip


class _Format(msgspec.Struct):
    """The type alone, because a schema may be large, and is checked when the request is translated."""

    type: Any = None


_temperature = field_decoder(float)
_format = field_decoder(_Format)


def check_fields(fields: Fields) -> None:
    """Raise `UnsupportedField` for the first top-level field that cannot be translated."""
    FIELDS.check(fields)
    temperature = read_field(fields, "temperature", _temperature)
    if temperature is not None and not 0 <= temperature <= TEMPERATURE_MAX:
        raise UnsupportedField(f"this model's server supports 0 to {TEMPERATURE_MAX:g}", "temperature")
    form = read_field(fields, "response_format", _format)
    if form is not None and form.type not in ("text", "json_schema"):
        raise UnsupportedField("this model's server supports only text and json_schema", "response_format.type")
