"""POST /v1/responses/compact: replaces a long conversation by the user's messages and a summary of the rest.

The summary is an answer of the model that the request names, which reads the conversation and then `REQUEST`. It is
returned as a `compaction` item. A client sends that item back as part of its next `input`, where it becomes a message
of the user. Like reasoning, the summary is encoded and not encrypted, because it says nothing that the client does not
know. A deployment that has the Responses API gets the client's request, and makes the item itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from gateway.core.errors import UpstreamCut
from gateway.core.native_requests import RESPONSES, NativeRequest
from gateway.endpoints.responses import ResponsesTranslator
from gateway.endpoints.responses.item_pages import complete_item
from gateway.endpoints.responses.passed import input_of_fields
from gateway.endpoints.responses.stored import NO_HISTORY, with_ids
from gateway.endpoints.responses.strict_json import ABSENT, check_names, is_given
from gateway.endpoints.responses.summaries import encode_summary
from gateway.prompts import reader
from gateway.prompts.reader import Fields
from gateway.types import Operation

Json = dict[str, Any]

PATH = "responses/compact"
REQUEST = (
    "Write a summary of this conversation for someone who will continue it, and who sees only the user's messages and "
    "your summary. Say what was decided, what was done and found (with names, paths, numbers and results of tools), "
    "what failed, and what is left to do. Write only the summary."
)


class CompactBody(msgspec.Struct):
    """The fields of a compaction request."""

    model: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    prompt_cache_options: msgspec.Raw = msgspec.Raw()
    prompt_cache_retention: msgspec.Raw = msgspec.Raw()
    service_tier: msgspec.Raw = msgspec.Raw()


class CompactEndpoint:
    """POST /v1/responses/compact."""

    path: ClassVar[str] = PATH
    operation: ClassVar[Operation] = Operation.CHAT

    def translator(self, call_id: str) -> CompactTranslator:
        return CompactTranslator(call_id)

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        return self.translator("").read(fields, body)


class CompactTranslator(ResponsesTranslator):
    """Translates one exchange of POST /v1/responses/compact. The result is not stored."""

    may_run_in_background: ClassVar[bool] = False

    def read(self, fields: Fields, body: bytes) -> reader.ParsedBody:
        check_names(CompactBody, fields)
        given = self._given(fields)
        request = {"type": "message", "role": "user", "content": REQUEST}
        resolved, self._input = self._input, None
        try:
            items = [*given, msgspec.Raw(msgspec.json.encode(request))] if given or self._items else []
            asked = {**fields, "input": msgspec.Raw(msgspec.json.encode(items))}
            parsed = super().read(asked, msgspec.json.encode(asked))
        finally:
            self._input = resolved
        native = NativeRequest(RESPONSES, self._native_fields(fields), path=PATH)
        return msgspec.structs.replace(parsed, native=native)

    def _given(self, fields: Fields) -> Sequence[msgspec.Raw]:
        """The items of the request's input, which may be absent."""
        if self._input is not None:
            return self._input
        return input_of_fields(fields) if is_given(fields.get("input", ABSENT)) else ()

    @property
    def _items(self) -> Sequence[msgspec.Raw]:
        """The items of the response that the request continues."""
        return (self._history or NO_HISTORY).items

    def _native_fields(self, fields: Fields) -> Fields:
        has_input = is_given(fields.get("input", ABSENT))
        return super()._native_fields(fields if has_input else {**fields, "input": msgspec.Raw(b"[]")})

    def answer(self, body: bytes) -> bytes:
        if self._passed is not None:
            return body
        assert self._response is not None and self._request is not None
        self._response.read_whole(body)
        response = self._response.json(self._response.status)
        summary = "".join(
            part["text"]
            for item in response["output"]
            if item["type"] == "message"
            for part in item["content"]
            if part["type"] == "output_text"
        )
        if not summary.strip():
            raise UpstreamCut("the deployment's answer has no summary")
        assert not isinstance(self._request.body.input, str)
        *given, _ = self._request.body.input
        kept = [complete_item(item) for item in with_ids([*self._items, *given], self._key) if _is_of_user(item)]
        compaction = {"type": "compaction", "id": f"cmp_{self._key}", "encrypted_content": encode_summary(summary)}
        fields: Json = {
            "id": self._response.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*kept, compaction],
        }
        # A deployment without usage: no number is better than a wrong one.
        return msgspec.json.encode(fields | {name: response[name] for name in ("usage",) if name in response})


def _is_of_user(item: bytes) -> bool:
    fields: Json = msgspec.json.decode(item)
    is_message: bool = fields.get("type", "message") == "message"
    return is_message and fields["role"] == "user"
