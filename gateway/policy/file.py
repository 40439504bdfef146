"""Policy files: read whole, with every problem told at its line; watched, and swapped only for a valid one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.policy import Check, Path, Policy, PolicyNameError, choices, located_yaml

MAX_POLICY_BYTES = 16 * 1024 * 1024
WATCH_SECONDS = 1.0

log = logging.getLogger(__name__)


class Problem(NamedTuple):
    """One thing that is wrong, for people (`str`) and for programs (the fields). Lines and columns count from 1."""

    file: str
    line: int
    column: int
    field: str  # dotted, as in deployments.0.base_url; empty: the file itself
    message: str

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        return f"{self.file}:{self.line}:{self.column}: {field}{self.message}"


class PolicyError(Exception):
    """The file is no policy. `problems` are all that were found, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(set(problems), key=lambda problem: (problem.line, problem.column, problem.field)))
        super().__init__("\n".join(map(str, self.problems)))


def load_policy(path: FilePath | str, *, checks: Sequence[Check] = ()) -> Policy:
    """Raises `PolicyError`, also where the file can not be read. `checks` judge what is a policy otherwise."""
    return parse_policy(_read(FilePath(path)), file=str(path), checks=checks)


def parse_policy(content: bytes, *, file: str, checks: Sequence[Check] = ()) -> Policy:
    """Raises `PolicyError`; `file` is the name that it gives."""
    try:
        located = located_yaml.load(_decode(content, file))
    except located_yaml.InvalidYaml as error:
        raise PolicyError([_problem(file, error.fault)]) from None
    problems = [_problem(file, fault) for fault in located.faults]

    def report(path: Path, message: str) -> None:
        field = ".".join(map(str, path))
        problems.append(Problem(file, *located.position(path), field, message))

    try:
        policy = Policy.model_validate(located.data)
    except ValidationError as error:
        for path, message in findings(error):
            report(path, message)
        raise PolicyError(problems) from None
    for check in checks:
        for path, message in check(policy):
            report(path, message)
    if problems:
        raise PolicyError(problems)
    return policy


def policy_schema() -> str:
    """The JSON Schema of a policy file, for editors: `policies/policy.schema.json`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def _read(path: FilePath) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PolicyError([Problem(str(path), 1, 1, "", f"can not be read: {reason}")]) from None
    if len(content) > MAX_POLICY_BYTES:
        raise PolicyError([Problem(str(path), 1, 1, "", f"is longer than {MAX_POLICY_BYTES} bytes")])
    return content


def _decode(content: bytes, file: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise PolicyError([Problem(file, line, column, "", "is not UTF-8 text")]) from None


def _problem(file: str, fault: located_yaml.YamlFault) -> Problem:
    return Problem(file, *fault.position, ".".join(map(str, fault.path)), fault.message)


# What pydantic found, in words for the one who wrote the file. Values are never repeated: some are secrets.

_PLAIN_WORDS = {
    "string_type": "must be text: put quotes around it",
    "dict_type": "must be a mapping, as in `key: value`",
    "tuple_type": "must be a list, as in `[a, b]`",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def findings(error: ValidationError, form: type[BaseModel] = Policy) -> Iterator[tuple[Path, str]]:
    """Also of a part of a policy, or of a form that has some, that came another way."""
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, PolicyNameError):
            yield from cause.findings
        elif detail["type"] != "too_short" or not detail["input"]:  # a list of wrong items counts as empty too
            yield detail["loc"], _in_words(detail, cause, form)


def _in_words(detail: ErrorDetails, cause: object, form: type[BaseModel]) -> str:
    kind, path = detail["type"], detail["loc"]
    match kind:
        case "extra_forbidden":
            known = [f.alias or name for name, f in _model_around(path, form).model_fields.items()]
            return f"unknown key {str(path[-1])!r}; {choices(str(path[-1]), known)}"
        case "missing":
            return f"is missing: {_description(path, form)}"
        case "model_type" if not path and form is Policy:
            return "must be a mapping with at least: deployments, models, tenants"
        case "model_type":
            keys = [f.alias or name for name, f in _model_around((*path, ""), form).model_fields.items()]
            return f"must be a mapping, with the keys {', '.join(keys)}"
        case "string_pattern_mismatch":
            return f"does not match {detail['ctx']['pattern']} ({_description(path, form)})"
        case "value_error":
            return str(cause)
        case _ if detail["input"] is None:
            return "is empty: give it a value, or leave the key out"
        case _:
            return _PLAIN_WORDS.get(kind) or detail["msg"].replace("Input should", "should")


def _description(path: Path, form: type[BaseModel]) -> str:
    field = {f.alias or name: f for name, f in _model_around(path, form).model_fields.items()}.get(str(path[-1]))
    return (field and field.description) or "part of a policy"


def _model_around(path: Path, form: type[BaseModel]) -> type[BaseModel]:
    """The model that the last key of `path` belongs to."""
    around: Any = form
    for key in path[:-1]:
        if _is_model(around):
            fields = {f.alias or name: f for name, f in around.model_fields.items()}
            around = fields[str(key)].annotation
        else:
            around = typing.get_args(around)[-1 if typing.get_origin(around) is dict else 0]
        around = _present(around)
    return typing.cast(type[BaseModel], around)


def _present(annotation: Any) -> Any:
    """Without its `| None` and its `Annotated`."""
    while typing.get_origin(annotation) is typing.Annotated or type(None) in typing.get_args(annotation):
        annotation = typing.get_args(annotation)[0]
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class PolicyHolder:
    """The policy in force. A reload replaces it whole or, where the file is no policy, not at all.

    `current` may be read at any time; what was read stays valid for as long as it is held. Listeners are told of
    every policy that differs from the one before, after it is in force; they must not raise. `checks` can refuse one.
    """

    def __init__(self, path: FilePath | str, *, checks: Sequence[Check] = ()) -> None:
        """Raises `PolicyError`: there is no last good policy yet."""
        self.path = FilePath(path)
        self._checks = tuple(checks)
        self._listeners: list[Callable[[Policy], None]] = []
        self._told_of_refusals: list[Callable[[], None]] = []
        self._lock = asyncio.Lock()
        self._stamp = _stamp(self.path)
        content = _read(self.path)
        self._digest = _digest(content)
        self.current = parse_policy(content, file=str(path), checks=self._checks)
        self.loaded_ns = time.time_ns()  # when `current` came into force
        self.last_error: PolicyError | None = None
        self.reloads_accepted = 0
        self.reloads_refused = 0

    def subscribe(self, listener: Callable[[Policy], None], *, refused: Callable[[], None] = lambda: None) -> None:
        """`refused` is told of every reload that came to nothing; `last_error` says why."""
        self._listeners.append(listener)
        self._told_of_refusals.append(refused)

    async def reload(self) -> bool:
        """Whether the file is a policy and in force now. If not, `last_error` says why and `current` stays.

        Files are read and judged in a thread; the swap is one step on the event loop.
        """
        async with self._lock:
            self._stamp = _stamp(self.path)
            try:
                policy = await asyncio.to_thread(self._load)
            except PolicyError as error:
                self.last_error = error
                self.reloads_refused += 1
                log.error("policy not reloaded, %s stays in force:\n%s", self.current.hash, error)
                for refused in self._told_of_refusals:
                    refused()
                return False
            self.last_error = None
            self.reloads_accepted += 1
            if policy.hash != self.current.hash:
                log.info("policy %s in force, instead of %s", policy.hash, self.current.hash)
                self.current = policy
                self.loaded_ns = time.time_ns()
                for listener in self._listeners:
                    listener(policy)
            else:
                log.info("policy %s stays in force: the file says the same", policy.hash)
            return True

    async def watch(self, *, every_seconds: float = WATCH_SECONDS) -> None:
        """Reload when the file's content changes, and on SIGHUP in any case. Runs until cancelled."""
        hangup = asyncio.Event()
        with _on_hangup(hangup):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(hangup.wait(), every_seconds)
                if hangup.is_set() or await self._has_changed():
                    hangup.clear()
                    await self.reload()

    def _load(self) -> Policy:
        self._digest = ""  # of what can not be read
        content = _read(self.path)
        self._digest = _digest(content)
        return parse_policy(content, file=str(self.path), checks=self._checks)

    async def _has_changed(self) -> bool:
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return await asyncio.to_thread(self._digest_now) != self._digest

    def _digest_now(self) -> str:
        try:
            return _digest(_read(self.path))
        except PolicyError:
            return "unreadable"


def _stamp(path: FilePath) -> tuple[int, ...]:
    """Changes whenever the file does, also by a rename over it; empty while it can not be seen."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _on_hangup(event: asyncio.Event) -> Iterator[None]:
    """Only the main thread may handle signals, and only POSIX has this one."""
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, event.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


__all__ = ["PolicyError", "PolicyHolder", "Problem", "findings", "load_policy", "parse_policy", "policy_schema"]
