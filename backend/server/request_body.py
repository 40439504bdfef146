"""Decodes a JSON body into a request type, or raises an InvalidRequest that names the invalid field.

No field is ignored silently:
  * The server acts on every field of the request type.
  * It accepts a field in HARMLESS, because the field cannot change the output.
  * It accepts a field in ONLY with the listed values, which describe what the server always does. It rejects others.
  * It passes over a field in FROM_ROUTERS, because routers add it. The response header `x-ignored-fields` names it.
  * It rejects any other field with an error that names the field. So a misspelt sampling parameter is never ignored.
  * It passes over unknown members of chat messages (`unknown_members.py`).
A known field that is null counts as absent, as in OpenAI's API.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import Struct

from backend.server.errors import InvalidRequest

HARMLESS = {
    "user": "the end user, for the caller's records",
    "safety_identifier": "newer name of `user`",
    "metadata": "labels for stored completions; this server stores none",
    "prompt_cache_key": "a routing hint, which this prefix cache does not need",
    "prompt_cache_retention": "retention in a hosted cache; this cache always evicts the least recently used",
    "prompt_cache_options": "breakpoints of a hosted cache; this cache caches every prefix",
    "cache_control": "the same in Anthropic's API",
    "prediction": "a speed hint that does not change the output",
    "request_id": "vLLM's field; this server takes the request id from x-request-id",
    "session_id": "vLLM's field; this server takes the session id from x-session-id",
    "mm_payload": "vLLM's field for image data from /render; this server has none",
    "return_mm_kwargs": "older name of `mm_payload`",
}

_NOTHING: tuple[object, ...] = ([], {})
_NO = (False,)
ONLY: dict[str, tuple[object, ...]] = {
    "store": _NO,
    "modalities": (["text"],),
    "functions": _NOTHING,
    "function_call": ("none",),
    "suffix": ("",),
    "verbosity": ("medium",),
    "use_beam_search": _NO,
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "logits_processors": _NOTHING,
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "guided_json_object": _NO,
    "structural_tag": (),
    "logprob_token_ids": _NOTHING,
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "watermarking": _NO,
    "echo": _NO,
    "detokenize": (True,),
    "stream_interval": (1,),
    "return_prompt_text": _NO,
    "return_token_offsets": _NO,
    "routed_experts_prompt_start": (0,),
    "normalize": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "chat_template": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": _NOTHING,
    "media_io_kwargs": _NOTHING,
    "vllm_xargs": _NOTHING,
    "ec_transfer_params": _NOTHING,
    # Fields of SGLang that change the output. Its router and vLLM's router may add them as null.
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "stop_regex": (),
    "lora_path": (),
    "session_params": (),
    "sampling_seed": (),
    "custom_params": (),
    "custom_logit_processor": (),
}

# Fields of SGLang that its router and vLLM's router add or pass on, with the values that describe what this server does
# anyway. They change no token, so every other value is passed over, too, and named in a header.
FROM_ROUTERS: dict[str, tuple[object, ...]] = {
    "stream_reasoning": (True,),
    "return_hidden_states": _NO,
    "return_routed_experts": _NO,
    "return_meta_info": _NO,
    "return_cached_tokens_details": _NO,
    "rid": (),
    "data_parallel_rank": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_labels": (),
}

GRAMMAR_FIELDS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
MAX_GRAMMAR_FIELD_BYTES = 512 * 1024

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
R = TypeVar("R", bound=Struct)


def decode_body(body: bytes, kind: type[R], ignored: list[str] | None = None) -> R:
    """Decodes a body into the request type `kind` and checks the name of every field. Raises InvalidRequest.

    Appends the names of fields that are passed over to `ignored`.
    """
    try:
        fields = _OBJECT.decode(body)
        passed_over = _check_names(fields, kind)
        if ignored is not None:
            ignored += passed_over
        _check_sizes(fields)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def _check_names(fields: dict[str, msgspec.Raw], kind: type[Struct]) -> list[str]:
    """Returns the names of fields that are passed over. Raises InvalidRequest for a field that is not."""
    ignored = []
    for name, raw in fields.items():
        if name in kind.__struct_fields__ or name in HARMLESS:
            continue
        supported_values = ONLY.get(name, FROM_ROUTERS.get(name))
        if supported_values is None:
            raise InvalidRequest(f"Unknown field `{name}`.", param=name)
        value = msgspec.json.decode(raw)
        if value is None or value in supported_values:
            continue
        if name in FROM_ROUTERS:
            ignored.append(name)
            continue
        allowed = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in ONLY[name])
        supported = f"; supported: {allowed}" if allowed else ""
        raise InvalidRequest(f"This value of `{name}` is not supported by this engine{supported}.", param=name)
    return ignored


def _check_sizes(fields: dict[str, msgspec.Raw]) -> None:
    """Refuses a field for the grammar compiler that is too large, before it becomes thousands of Python objects."""
    for name in GRAMMAR_FIELDS & fields.keys():
        size = len(bytes(fields[name]))
        if size > MAX_GRAMMAR_FIELD_BYTES:
            raise InvalidRequest(
                f"`{name}` has {size} bytes; a grammar may have {MAX_GRAMMAR_FIELD_BYTES}.", param=name
            )


def validation_error(error: msgspec.ValidationError, prefix: str = "") -> InvalidRequest:
    """Converts msgspec's error into an InvalidRequest with the field's path.

    `prefix` is the path of the converted value within the body. msgspec ends its message with the path:
    "Expected `int`, got `str` - at `$.messages[0].name`".
    """
    message, _, place = str(error).partition(" - at ")
    path = (prefix + place.removeprefix("`key` in ").strip("`").removeprefix("$")).removeprefix(".")
    named = re.search(r"(?:unknown|required) field `([^`]+)`", message)
    if named:
        return InvalidRequest(f"{message} in {path or 'the body'}.", param=f"{path}.{named[1]}".removeprefix("."))
    where = f"`{path}`" if path else "The body"
    return InvalidRequest(f"{where}: {message[:1].lower()}{message[1:]}.", param=path or None)
