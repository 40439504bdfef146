"""The Responses API's response object: the answer, its status and usage, and the repeated fields of the request.

`ResponseObject` reads a chat answer, complete or chunk by chunk, and returns the events of the output. `json` returns
the response object at any time: while it is in progress, at its end, or after a failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, UpstreamCut
from gateway.endpoints.chat_answers import AssistantMessage, ChatAnswer, ChatChoice, TokenLogprob, read_answer
from gateway.endpoints.responses import logprobs
from gateway.endpoints.responses.body import ResponsesRequest
from gateway.endpoints.responses.output import Events, OutputItems
from gateway.endpoints.responses.strict_json import is_given
from gateway.providers.usage import normalize_usage

Json = dict[str, Any]
TEXT_FORMAT = {"type": "text"}
UNFINISHED = ("queued", "in_progress")  # statuses of a response without output

# Why a response is incomplete, for each `finish_reason` of a chat. None: it is complete. Other reasons are errors.
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


class ResponseObject:
    """One response object, updated with each chunk of the answer.

    `key` is the part that the ids of the response and its items have in common. `stored` becomes the response's `store`
    field: whether the response is stored, or will be stored at its end.
    """

    def __init__(self, key: str, request: ResponsesRequest, *, stored: bool) -> None:
        self.output = OutputItems(key, request.tools, is_encoded=request.wants_encrypted_reasoning, is_stored=stored)
        self.id = f"resp_{key}"
        self.stored = stored
        self.status = "in_progress"  # then completed, incomplete or failed
        self.conversation = request.conversation  # None if the response could not be added to it
        self._request = request
        self._echo: Json = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in echo(request).items()}
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._model = request.body.model
        self._service_tier: str | None = None
        self._usage: Json | None = None
        self._reason: str | None = None

    def read(self, answer: ChatAnswer) -> Events:
        """Add one chunk of a stream. Returns the events of the change. Raises `UpstreamCut`."""
        self._update(answer)
        events: Events = []
        for choice in answer.choices or ():
            if choice.index == 0:
                events += self._add(choice, choice.delta or AssistantMessage(), _logprobs(choice))
        return events

    def read_whole(self, body: bytes) -> None:
        """Set a whole answer, which ends the response. Raises `UpstreamCut`."""
        answer = read_answer(body)
        self._update(answer)
        choice, message = answer.message
        self._add(choice, message, logprobs.text_logprobs(message, _logprobs(choice)))
        self.end()

    def _update(self, answer: ChatAnswer) -> None:
        self._model = answer.model or self._model
        self._service_tier = answer.service_tier or self._service_tier
        self._usage = _usage(answer) or self._usage

    def _add(self, choice: ChatChoice, message: AssistantMessage, token_logprobs: list[TokenLogprob]) -> Events:
        self._reason = choice.finish_reason or self._reason
        return self.output.add(message, token_logprobs if self._request.wants_logprobs else ())

    def end(self) -> Events:
        """Set the final status, and return the events that end the items.

        Raises `UpstreamCut` if the finish reason says that the answer is not complete.
        """
        if self._reason not in INCOMPLETE:
            raise UpstreamCut(f"the deployment ended its answer with the finish reason {self._reason!r}")
        self.status = "completed" if INCOMPLETE[self._reason] is None else "incomplete"
        self._completed_at = int(time.time()) if self.status == "completed" else None
        return self.output.end(self.status)

    def cut(self) -> None:
        """End the open items as incomplete, without events."""
        self.output.cut()

    def fail(self) -> None:
        """Set the status to failed, and end the open items as incomplete. A failed response is not stored."""
        self.status, self.stored = "failed", False
        self.output.cut()

    def json(self, status: str, error: GatewayError | None = None) -> Json:
        """Return OpenAI's response object with this status. A response in progress has no output."""
        ended = status in ("completed", "incomplete")
        reason = INCOMPLETE[self._reason] if status == "incomplete" else None
        fields: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "completed_at": self._completed_at,
            "error": None if error is None else {"code": _code(error), "message": error.message},
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._model,
            "output": self.output.json() if status not in UNFINISHED else [],
            **self._echo,
            "service_tier": self._service_tier,
            "store": self.stored,
        }
        if self._request.conversation is not None:
            fields["conversation"] = None if self.conversation is None else {"id": self.conversation}
        return {**fields, "usage": self._usage} if ended and self._usage is not None else fields


def echo(request: ResponsesRequest) -> Json:
    """Return the request's fields that a response repeats, with defaults for absent fields.

    Defaults that only the deployment knows, such as the temperature, are null.
    """
    body = request.body
    text: Json = {"format": request.text.format if is_given(request.text.format) else TEXT_FORMAT}
    if request.text.verbosity is not None:
        text["verbosity"] = request.text.verbosity
    fields: Json = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "background": body.background is True,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "temperature": body.temperature,
        "text": text,
        "tool_choice": body.tool_choice if is_given(body.tool_choice) else "auto",
        "tools": request.tools.echo,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }
    return fields if body.user is None else {**fields, "user": body.user}


def _code(error: GatewayError) -> str:
    """Return the error code of a failed response. OpenAI's API has a fixed set of codes."""
    return "rate_limit_exceeded" if error.status == 429 else "server_error"


def _logprobs(choice: ChatChoice) -> list[TokenLogprob]:
    return (choice.logprobs.content if choice.logprobs is not None else None) or []


def _usage(answer: ChatAnswer) -> Json | None:
    """Return OpenAI's usage object, or None if the deployment sent no usage."""
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
