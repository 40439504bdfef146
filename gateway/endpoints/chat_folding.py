"""Folds the chunks of a streamed chat into the answer that the deployment would have sent without streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.providers.sse import event_data

Json = dict[str, Any]

DONE = b"[DONE]"
REPLACED = frozenset({"id", "type", "role", "index"})  # strings that some servers repeat in each piece

_chunk = msgspec.json.Decoder(dict[str, Any])


def fold_chat(chunks: Sequence[bytes]) -> Json:
    """Return the answer in the frames of a stream.

    Raises one of `stored_chats.UNREADABLE_ANSWER` if a frame is not a chunk of a chat.
    """
    answer: Json = {}
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for data in event_data(chunk):
            if data and data != DONE:
                _add(answer, choices, _chunk.decode(data))
    answer["object"] = "chat.completion"
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add(answer: Json, choices: dict[int, Json], chunk: Json) -> None:
    for given in chunk.get("choices") or ():
        choice = choices.setdefault(given.get("index") or 0, {"index": given.get("index") or 0, "message": {}})
        _merge(choice["message"], given.get("delta") or {})
        if given.get("logprobs"):
            logprobs = choice.setdefault("logprobs", {})
            _merge(logprobs, given["logprobs"])
        for name, value in given.items():
            if name not in ("index", "delta", "logprobs") and value is not None:
                choice[name] = value
    for name, value in chunk.items():
        if name != "choices" and value is not None:
            answer[name] = value


def _merge(whole: Json, piece: Json) -> None:
    """Add a piece of an object: texts are continued, and lists are extended or continued at the piece's index."""
    for name, value in piece.items():
        before = whole.get(name)
        if value is None or before is None:
            whole[name] = before if value is None else _begun(value)
        elif isinstance(value, str) and isinstance(before, str) and name not in REPLACED:
            whole[name] = before + value
        elif isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            _extend(before, value)
        else:
            whole[name] = value


def _begun(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    whole: list[Any] = []
    _extend(whole, value)
    return whole


def _extend(whole: list[Any], pieces: list[Any]) -> None:
    """Add elements. One with an index, such as a piece of a tool call, continues the element that has this index."""
    for piece in pieces:
        index = piece.get("index") if isinstance(piece, dict) else None
        known = next((each for each in whole if isinstance(each, dict) and each.get("index") == index), None)
        if index is None or known is None:
            whole.append(piece)
        else:
            _merge(known, piece)


def without_indexes(message: Json) -> Json:
    """Return a folded message without the indexes of its tool calls, which only pieces have."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    plain = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return {**message, "tool_calls": plain}
