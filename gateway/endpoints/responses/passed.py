"""The response of a deployment that has the Responses API itself: passes unchanged, and can be stored and failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.core.errors import GatewayError
from gateway.endpoints.responses.conversations import Conversation
from gateway.endpoints.responses.stored import MAX_ID_CHARACTERS, ResponseHistory, StoredTurn, document_of, with_ids
from gateway.prompts.reader import Fields
from gateway.providers.sse import UNREADABLE, event_data
from gateway.response_store import TenantResponses

Json = dict[str, Any]
STORED_STATUSES = ("completed", "incomplete")
NO_OUTPUT = msgspec.Raw(b"[]")


class _Event(msgspec.Struct):
    sequence_number: int = 0
    response: msgspec.Raw = msgspec.Raw()


_event = msgspec.json.Decoder(_Event).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_text = msgspec.json.Decoder(str).decode


def input_of_fields(fields: Fields) -> Sequence[msgspec.Raw]:
    """Return the items of a request's `input`. A text is one message of the user."""
    given = bytes(fields.get("input", b"[]"))
    if given.startswith(b"["):
        return _items(given)
    part = b'{"type":"message","role":"user","content":[{"type":"input_text","text":%b}]}' % given
    return (msgspec.Raw(part),)


class PassedResponse:
    """What the gateway notes of a response that passes: its newest object, and the number of the last event."""

    def __init__(self) -> None:
        self.held = b""  # the last bytes, which are sent once the response is stored
        self._response: dict[str, msgspec.Raw] = {}
        self._sequence_number = -1

    def read(self, frames: bytes) -> None:
        """Read frames of a stream."""
        for data in event_data(frames):
            if data:
                event = _event(data)
                self._sequence_number = event.sequence_number
                if bytes(event.response).startswith(b"{"):
                    self.set_response(bytes(event.response))

    def set_response(self, response: bytes) -> None:
        """Set the response's object."""
        self._response = _object(response)

    @property
    def is_storable(self) -> bool:
        """Whether the response has ended, with an id that the storage takes and with objects as its output."""
        try:
            status, name = _text(self._response["status"]), _text(self._response["id"])
            _objects(self._response.get("output", NO_OUTPUT))
        except (KeyError, *UNREADABLE):
            return False
        return status in STORED_STATUSES and 0 < len(name) <= MAX_ID_CHARACTERS

    async def store(
        self,
        fields: Fields,
        resolved: Sequence[msgspec.Raw] | None,
        history: ResponseHistory,
        responses: TenantResponses,
        call_id: str,
        conversation: Conversation | None,
    ) -> None:
        """Store the response with its input, which is `resolved` if it had references to items.

        Adds both to the conversation, if there is one.
        """
        name = _text(self._response["id"])
        given = input_of_fields(fields) if resolved is None else resolved
        key = call_id.removeprefix("req_")
        output = with_ids(_items(self._response.get("output", NO_OUTPUT)), f"{key}o")
        turn = StoredTurn(with_ids(given, key), output)
        if conversation is not None:
            await conversation.append(turn, call_id=call_id)
        if bytes(fields.get("store", b"")) != b"false":
            owner = "" if conversation is None else conversation.id
            document = document_of(dict(self._response), turn, history, conversation=owner)
            await responses.put(name, document, call_id=call_id)

    def failure(self, error: GatewayError) -> bytes:
        """Return the event that reports an error in a stream that has begun."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response: Json = {**self._response, "status": "failed", "error": {"code": code, "message": error.message}}
        event = {"type": "response.failed", "sequence_number": self._sequence_number + 1, "response": response}
        return b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event)
