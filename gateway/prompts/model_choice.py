"""Chooses the model that answers a call: the one that the client named, or the one that the policy's routes name.

Shares and weights apply to a hash of the conversation, so that all gateways choose the same without communicating, and
all calls of a conversation are treated equally. The route's targets are part of the hash, so that two routes do not
choose the same conversations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import xxhash

from gateway.policy.model_routes import ModelRoute
from gateway.prompts.media.counting import Piece
from gateway.prompts.reader import ParsedBody

_SCALE = 1 << 64


def choose_route(
    routes: Sequence[ModelRoute], matches: Callable[[int], bool], parsed: ParsedBody, conversation: str
) -> tuple[int, str | None] | None:
    """Return the index of the first route that applies, and its model; None if no route applies.

    `matches` says whether the conditions of the route with this index hold. The model is None if the route keeps the
    model that the client named. `conversation` is the session or end user, if known.
    """
    for index, route in enumerate(routes):
        if (
            route.applies_at(time.time())
            and matches(index)
            and (route.share >= 1.0 or _position("|".join(route.targets), parsed, conversation) < route.share)
        ):
            return index, _target(route, parsed, conversation)
    return None


def _target(route: ModelRoute, parsed: ParsedBody, conversation: str) -> str | None:
    if not route.ends:
        return route.targets[0] if route.targets else None
    return choose_deployment(route.ends, parsed, conversation)


def choose_deployment(ends: Sequence[tuple[str, float]], parsed: ParsedBody, conversation: str) -> str:
    """Return the deployment that gets a conversation, by the weights of its model (`Model.weight_ends`)."""
    position = _position("weights of " + "|".join(name for name, _ in ends), parsed, conversation)
    return next((name for name, end in ends if position < end), ends[-1][0])


def _position(salt: str, parsed: ParsedBody, conversation: str) -> float:
    """A number from 0 to 1 that is the same for all calls of a conversation."""
    digest = xxhash.xxh3_64(f"{salt}\n{conversation}".encode())
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
