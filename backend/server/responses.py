"""The wire out: OpenAI's shapes, field for field. Everything here is a plain function of its arguments."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import Any

import orjson

from backend.engine.request import TokenLogprob
from backend.server.requests import GenerationRequest
from backend.server.sequence import ChoiceDelta
from backend.server.tokenizer import TextCodec
from backend.server.usage_records import TokenUsage

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]
TokenName = Callable[[int], str]  # how a token is called in log-probabilities


def encode(payload: Json | list[Json]) -> bytes:
    return orjson.dumps(payload)


def event(payload: Json) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def usage_object(usage: TokenUsage) -> Json:
    """`cached_tokens` are a part of `prompt_tokens`: those whose keys and values were found in the prefix cache."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all pieces of one reply share."""

    id: str
    object: str
    created: int
    model: str
    service_tier: str | None  # only where the client asked for one

    def wrap(self, choices: list[Json], usage: Json | None, *, with_usage: bool, extra: Json | None = None) -> Json:
        """`extra`: fields of vLLM's that a request asked for."""
        payload: Json = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.service_tier is not None:
            payload["service_tier"] = self.service_tier
        if with_usage:
            payload["usage"] = usage
        return payload | (extra or {})


def chat_choice(index: int, message: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {
        "index": index,
        "message": {"role": "assistant", **message, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def chat_delta(index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def stop_reason(last: ChoiceDelta) -> Json:
    """vLLM's, of a choice that is complete: which stop string or token of the request's own ended it, or null."""
    return {"stop_reason": last.stop_reason} if last.finish_reason else {}


def text_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def token_namer(codec: TextCodec, request: GenerationRequest) -> TokenName:
    """By id where asked for, since different tokens may read alike."""
    return "token_id:{}".format if request.return_tokens_as_token_ids else codec.token_text


def chat_logprobs(codec: TextCodec, name: TokenName, logprobs: Sequence[TokenLogprob]) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(codec.token_bytes(token_id)),
        }

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*alternative) for alternative in token.top]}
        for token in logprobs
    ]
    return {"content": content, "refusal": None}


def echoed_logprobs(name: TokenName, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json:
    """Of a prompt that is echoed. Nothing comes before its first token, which so has no probability."""
    first = name(prompt[0])
    rest = text_logprobs(name, logprobs, len(first))
    nothing: Json = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return {field: [*nothing[field], *rest[field]] for field in nothing}


def joined_logprobs(parts: Sequence[Json]) -> Json:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def prompt_logprobs(codec: TextCodec, logprobs: Sequence[TokenLogprob]) -> list[Json | None]:
    """vLLM's form: one object per token of the prompt, by token id; null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": codec.token_text(token_id)}

    return [
        None,
        *(
            {str(token.token_id): entry(token.token_id, token.logprob, token.rank)}
            | {str(id): entry(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, start=1)}
            for token in logprobs
        ),
    ]


def text_logprobs(name: TokenName, logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """The older form of /v1/completions. `offset`: of the first token, in characters of the choice's text."""
    tokens = [name(token.token_id) for token in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(token.logprob) for token in logprobs],
        # The token that was chosen is always among them, so there may be one more than was asked for.
        "top_logprobs": [
            {name(i): _finite(lp) for i, lp in (*token.top, (token.token_id, token.logprob))} for token in logprobs
        ],
        "text_offset": offsets,
    }


def embedding(index: int, values: Sequence[float], encoding_format: str) -> Json:
    return {
        "object": "embedding",
        "index": index,
        "embedding": list(values) if encoding_format == "float" else _base64(values),
    }


def _base64(values: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients ask for unless told otherwise."""
    packed = array("f", values)
    if byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999.0 is OpenAI's word for a token that could not be chosen."""
    return max(logprob, -9999.0)


def token_ids(deltas: Sequence[ChoiceDelta]) -> Json:
    return {"token_ids": [token_id for delta in deltas for token_id in delta.token_ids]}


def joined(deltas: Sequence[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)
