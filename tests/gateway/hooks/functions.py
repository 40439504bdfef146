"""Functions that the tests' policies name as hooks. Each records what it saw in `SEEN`."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from typing import Any

from gateway.hooks import Answer, Reject, Request

EMAIL = re.compile(r"[\w.]+@[\w.]+")
SEEN: list[Request | Answer] = []
GO_ON = threading.Event()


def mask(request: Request) -> dict[str, Any]:
    """Mask addresses in all texts of a body."""
    SEEN.append(request)
    masked = _masked(request.body)
    assert isinstance(masked, dict)
    return masked


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return EMAIL.sub("[email]", value)
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return {name: _masked(each) for name, each in value.items()} if isinstance(value, dict) else value


async def watch(request: Request) -> None:
    SEEN.append(request)


def reject(request: Request) -> None:
    raise Reject("no secrets, please", status=422)


def spoil_and_fail(request: Request) -> None:
    request.body["messages"] = []
    raise KeyError("a bug")


def return_nonsense(request: Request) -> str:
    return "nonsense"


def return_an_object(request: Request) -> dict[str, Any]:
    return {**request.body, "object": object(), "number": 10**30}


async def sleep(request: Request) -> None:
    await asyncio.Event().wait()


def block(request: Request) -> None:
    GO_ON.wait(10)


def mask_answer(answer: Answer) -> Sequence[str]:
    SEEN.append(answer)
    return [EMAIL.sub("[email]", text) for text in answer.texts]


async def leave_answer(answer: Answer) -> None:
    SEEN.append(answer)


def reject_answer(answer: Answer) -> None:
    raise Reject("the answer is withheld")


def forget_a_text(answer: Answer) -> Sequence[str]:
    return []
