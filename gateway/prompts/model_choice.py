"""Chooses the model that answers a call: the one that the client named, or the one that the policy's routes name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import xxhash

from gateway.policy.model_routes import ModelRoute
from gateway.prompts.media.counting import Piece
from gateway.prompts.reader import ParsedBody

_SCALE = 1 << 64


def routed_model(
    routes: Sequence[ModelRoute], matches: Callable[[ModelRoute], bool], parsed: ParsedBody, conversation: str
) -> str | None:
    """Return the model of the first route that applies, or None. `conversation` is its session or end user, if known.

    The share is taken of a hash of the conversation and of the route's model, so that gateways agree without talking,
    and two routes with a share do not take the same conversations.
    """
    for route in routes:
        if (
            route.applies_at(time.time())
            and matches(route)
            and (route.share >= 1.0 or _position(route.to, parsed, conversation) < route.share)
        ):
            return route.to
    return None


def _position(model: str, parsed: ParsedBody, conversation: str) -> float:
    """A number from 0 to 1 that is the same for all calls of a conversation."""
    digest = xxhash.xxh3_64(f"{model}\n{conversation}".encode())
    if not conversation:
        for piece in _beginning(parsed):
            digest.update(_bytes_of(piece))
    return digest.intdigest() / _SCALE


def _beginning(parsed: ParsedBody) -> Sequence[Piece]:
    """The messages up to the first of the user, which later turns repeat. Without messages, the whole prompt."""
    users = (number for number, message in enumerate(parsed.messages) if message.role == "user")
    first = next(users, None)
    return parsed.pieces if first is None else parsed.pieces[parsed.tools : parsed.tools + first + 1]


def _bytes_of(piece: Piece) -> bytes:
    return piece if isinstance(piece, bytes) else repr(piece).encode()
