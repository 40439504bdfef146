"""The response object: what was asked for, said back, and what has come of it by now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, UpstreamCut
from gateway.endpoints.chat_answers import Answer, Choice, Said, TokenLogprob, read_answer
from gateway.endpoints.responses import logprobs
from gateway.endpoints.responses.body import ResponsesRequest
from gateway.endpoints.responses.output import Events, Output
from gateway.endpoints.responses.reading import is_given
from gateway.providers.usage import normalize_usage

Json = dict[str, Any]
TEXT_FORMAT = {"type": "text"}

# By a chat's `finish_reason`, why a response is incomplete; None where it is not. What is in neither was cut.
INCOMPLETE: Mapping[str | None, str | None] = {
    None: None,
    "stop": None,
    "eos_token": None,
    "tool_calls": None,
    "function_call": None,
    "length": "max_output_tokens",
    "model_length": "max_output_tokens",
    "content_filter": "content_filter",
}


class Response:
    """One response, from its beginning. `key` makes its id and those of its items. `stored` is what it says of itself:
    that it is kept, or will be.
    """

    def __init__(self, key: str, asked: ResponsesRequest, *, stored: bool) -> None:
        self.output = Output(key, asked.tools, seals=asked.seals_reasoning, keeps=stored)
        self.id = f"resp_{key}"
        self.stored = stored
        self.status = "in_progress"  # or how it has ended
        self._asked = asked
        self._echo: Json = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in echo(asked).items()}
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._model = asked.body.model
        self._service_tier: str | None = None
        self._usage: Json | None = None
        self._reason: str | None = None

    def read(self, answer: Answer) -> Events:
        """What one more piece of the answer changes. Raises `UpstreamCut`."""
        self._learn(answer)
        events: Events = []
        for choice in answer.choices or ():
            if choice.index == 0:
                events += self._take(choice, choice.delta or Said(), _logprobs(choice))
        return events

    def read_whole(self, body: bytes) -> None:
        """All of the answer, and its end. Raises `UpstreamCut`."""
        answer = read_answer(body)
        self._learn(answer)
        choice, message = answer.message
        self._take(choice, message, logprobs.of_text(message, _logprobs(choice)))
        self.end()

    def _learn(self, answer: Answer) -> None:
        self._model = answer.model or self._model
        self._service_tier = answer.service_tier or self._service_tier
        self._usage = _usage(answer) or self._usage

    def _take(self, choice: Choice, said: Said, known: list[TokenLogprob]) -> Events:
        self._reason = choice.finish_reason or self._reason
        return self.output.take(said, known if self._asked.wants_logprobs else ())

    def end(self) -> Events:
        """The answer has come to its end, and its status is known: the events before that is told.

        Raises `UpstreamCut` where the server says that it has not.
        """
        if self._reason not in INCOMPLETE:
            raise UpstreamCut(f"the server ended its answer with {self._reason!r}")
        self.status = "completed" if INCOMPLETE[self._reason] is None else "incomplete"
        self._completed_at = int(time.time()) if self.status == "completed" else None
        return self.output.end(self.status)

    def fail(self) -> None:
        """It stays as it is. What has failed is not kept."""
        self.status, self.stored = "failed", False
        self.output.cut()

    def json(self, status: str, error: GatewayError | None = None) -> Json:
        ended = status not in ("in_progress", "failed")
        reason = INCOMPLETE[self._reason] if status == "incomplete" else None
        told: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "completed_at": self._completed_at,
            "error": None if error is None else {"code": _code(error), "message": error.message},
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._model,
            "output": self.output.json() if status != "in_progress" else [],
            **self._echo,
            "service_tier": self._service_tier,
            "store": self.stored,
        }
        return {**told, "usage": self._usage} if ended and self._usage is not None else told


def echo(asked: ResponsesRequest) -> Json:
    """The request's fields that a response has, with what holds where nothing was said. What only the model knows, such
    as its own temperature, is null."""
    body = asked.body
    text: Json = {"format": asked.text.format if is_given(asked.text.format) else TEXT_FORMAT}
    if asked.text.verbosity is not None:
        text["verbosity"] = asked.text.verbosity
    told: Json = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "background": False,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "temperature": body.temperature,
        "text": text,
        "tool_choice": body.tool_choice if is_given(body.tool_choice) else "auto",
        "tools": asked.tools.told,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }
    return told if body.user is None else {**told, "user": body.user}


def _code(error: GatewayError) -> str:
    """One of those that a response may fail with."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def _logprobs(choice: Choice) -> list[TokenLogprob]:
    return (choice.logprobs.content if choice.logprobs is not None else None) or []


def _usage(answer: Answer) -> Json | None:
    """None where the server has not counted."""
    counts = answer.counts
    usage = None if counts is None else normalize_usage(counts)
    if usage is None:
        return None
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }
