"""Parses policy files, reports every problem with its line number, and reloads the policy while the gateway runs.

`load_policy` reads a file in three steps: YAML with positions (`located_yaml`), the pydantic models, and further checks
that the caller passes. All problems are collected and raised as one `PolicyError`. Errors of pydantic are translated
into messages for the author of the file. No message repeats a value of the file, since some values are secrets.

`PolicyHolder` has the policy in force. It polls the file and reloads it on SIGHUP or if the content has changed. A
policy is only replaced by a valid one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from gateway.policy.located_yaml import LocatedYaml
from gateway.policy.partial import valid_part

MAX_POLICY_BYTES = 16 * 1024 * 1024
WATCH_SECONDS = 1.0

log = logging.getLogger(__name__)


class Problem(NamedTuple):
    """One problem of a policy file. `str` is the line that `warmpath check` prints. Lines and columns count from 1."""

    file: str
    line: int
    column: int
    field: str  # dotted path, as in deployments.0.base_url; empty for the file itself
    message: str

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        return f"{self.file}:{self.line}:{self.column}: {field}{self.message}"


class PolicyError(Exception):
    """The file is not a valid policy. `problems` lists all of them, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(set(problems), key=lambda problem: (problem.line, problem.column, problem.field)))
        super().__init__("\n".join(map(str, self.problems)))


def load_policy(path: FilePath | str, *, checks: Sequence[Check] = ()) -> Policy:
    """Read a policy file. `checks` run if the file is valid otherwise.

    Raises `PolicyError` if the file is invalid or cannot be read.
    """
    return load_located(path, checks=checks)[0]


def load_located(path: FilePath | str, *, checks: Sequence[Check] = ()) -> tuple[Policy, LocatedYaml]:
    """Read a policy file, as `load_policy`. Also returns its content with positions, for `warnings_of`."""
    return _parse(read_policy(FilePath(path)), str(path), checks)


def parse_policy(content: bytes, *, file: str, checks: Sequence[Check] = ()) -> Policy:
    """Parse a policy. Raises `PolicyError`, in which `file` is the name of the file."""
    return _parse(content, file, checks)[0]


@contextlib.contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Parsing makes many objects and no garbage, so collections in the block would take more time than parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_paused_garbage_collection()
def _parse(content: bytes, file: str, checks: Sequence[Check]) -> tuple[Policy, LocatedYaml]:
    located = _load_yaml(content, file)
    problems = [_problem(file, fault) for fault in located.faults]

    def report(path: Path, message: str) -> None:
        field = ".".join(map(str, path))
        problems.append(Problem(file, *located.position(path), field, message))

    try:
        policy = Policy.model_validate(located.data)
    except ValidationError as error:
        for path, message in findings(error):
            report(path, message)
        rest, contradictions = valid_part(located.data, error)
        for path, message in (*contradictions, *(found for check in checks if rest for found in check(rest))):
            report(path, message)
        raise PolicyError(problems) from None
    for check in checks:
        for path, message in check(policy):
            report(path, message)
    if problems:
        raise PolicyError(problems)
    return policy, located


def warnings_of(
    path: FilePath | str, policy: Policy, located: LocatedYaml, checks: Sequence[Check]
) -> tuple[Problem, ...]:
    """What these checks find in a policy that `load_located` has read from this file, with lines."""
    found = [finding for check in checks for finding in check(policy)]
    return tuple(Problem(str(path), *located.position(where), ".".join(map(str, where)), what) for where, what in found)


def policy_schema() -> str:
    """The JSON Schema of a policy file, for editors: `policies/policy.schema.json`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Policy.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def read_policy(path: FilePath) -> bytes:
    """The content of a policy file. Raises `PolicyError` if it cannot be read or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_POLICY_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PolicyError([Problem(str(path), 1, 1, "", f"cannot be read: {reason}")]) from None
    if len(content) > MAX_POLICY_BYTES:
        raise PolicyError([Problem(str(path), 1, 1, "", f"is longer than {MAX_POLICY_BYTES} bytes")])
    return content


def parse_yaml(content: bytes, *, file: str) -> Any:
    """Parse YAML that is not a policy, with a policy's bounds and messages. Raises `PolicyError`."""
    located = _load_yaml(content, file)
    if located.faults:
        raise PolicyError([_problem(file, fault) for fault in located.faults])
    return located.data


def _load_yaml(content: bytes, file: str) -> LocatedYaml:
    try:
        return located_yaml.load(_decode(content, file))
    except located_yaml.InvalidYaml as error:
        raise PolicyError([_problem(file, error.fault)]) from None


def _decode(content: bytes, file: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise PolicyError([Problem(file, line, column, "", "is not UTF-8 text")]) from None


def _problem(file: str, fault: located_yaml.YamlFault) -> Problem:
    return Problem(file, *fault.position, ".".join(map(str, fault.path)), fault.message)


# Pydantic's errors as messages for the author of the file. Values are never repeated: some are secrets.

_MESSAGES = {
    "string_type": "must be text: put quotes around it",
    "dict_type": "must be a mapping, as in `key: value`",
    "tuple_type": "must be a list, as in `[a, b]`",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def findings(error: ValidationError, form: type[BaseModel] = Policy) -> Iterator[tuple[Path, str]]:
    """Translate a validation error into findings.

    `form` is the validated model: `Policy`, or another model that contains parts of a policy, as in the admin API.
    """
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, PolicyNameError):
            yield from cause.findings
        elif (
            detail["type"] != "too_short" or not detail["input"]
        ):  # pydantic also calls a list of invalid items too short
            yield detail["loc"], _message(detail, cause, form)


def _message(detail: ErrorDetails, cause: object, form: type[BaseModel]) -> str:
    kind, path = detail["type"], detail["loc"]
    match kind:
        case "extra_forbidden":
            known = [f.alias or name for name, f in _model_around(path, form).model_fields.items()]
            return f"unknown key {str(path[-1])!r}; {choices(str(path[-1]), known)}"
        case "missing":
            return f"is required: {_description(path, form)}"
        case "model_type" if not path and form is Policy:
            return "must be a mapping with at least the keys deployments, models and tenants"
        case "model_type":
            keys = [f.alias or name for name, f in _model_around((*path, ""), form).model_fields.items()]
            return f"must be a mapping, with the keys {', '.join(keys)}"
        case "string_pattern_mismatch":
            return f"does not match {detail['ctx']['pattern']} ({_description(path, form)})"
        case "value_error":
            return str(cause)
        case _ if detail["input"] is None:
            return "is empty: set a value or remove the key"
        case _:
            return _MESSAGES.get(kind) or detail["msg"].replace("Input should", "should")


def _description(path: Path, form: type[BaseModel]) -> str:
    field = {f.alias or name: f for name, f in _model_around(path, form).model_fields.items()}.get(str(path[-1]))
    return (field and field.description) or "part of a policy"


def _model_around(path: Path, form: type[BaseModel]) -> type[BaseModel]:
    """Return the model that has the last key of `path` as a field."""
    around: Any = form
    for key in path[:-1]:
        if _is_model(around):
            fields = {f.alias or name: f for name, f in around.model_fields.items()}
            around = fields[str(key)].annotation
        else:
            around = typing.get_args(around)[-1 if typing.get_origin(around) is dict else 0]
        around = _unwrapped(around)
    return typing.cast(type[BaseModel], around)


def _unwrapped(annotation: Any) -> Any:
    """Return the annotation without `| None` and `Annotated`."""
    while typing.get_origin(annotation) is typing.Annotated or type(None) in typing.get_args(annotation):
        annotation = typing.get_args(annotation)[0]
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class PolicyHolder:
    """Has the policy in force, and reloads it. An invalid file leaves the policy unchanged.

    `current` may be read at any time. A policy is immutable, so callers may use it for as long as they need it.
    Listeners are called with each policy that differs from the previous one, after it took effect. They must not raise.
    `checks` can reject a policy.
    """

    def __init__(self, path: FilePath | str, *, checks: Sequence[Check] = ()) -> None:
        """Load the first policy. Raises `PolicyError`, since there is no earlier policy to keep."""
        self.path = FilePath(path)
        self.checks = tuple(checks)
        self._listeners: list[Callable[[Policy], None]] = []
        self._refusal_listeners: list[Callable[[], None]] = []
        self._lock = asyncio.Lock()
        self._stamp = _stamp(self.path)
        content = read_policy(self.path)
        self._digest = content_digest(content)
        self.current = parse_policy(content, file=str(path), checks=self.checks)
        self.loaded_ns = time.time_ns()  # when `current` took effect
        self.last_error: PolicyError | None = None
        self.reloads_accepted = 0
        self.reloads_refused = 0

    def subscribe(self, listener: Callable[[Policy], None], *, refused: Callable[[], None] = lambda: None) -> None:
        """Register a listener for new policies. `refused` is called for every rejected reload; see `last_error`."""
        self._listeners.append(listener)
        self._refusal_listeners.append(refused)

    async def reload(self) -> bool:
        """Reload the file. Returns True if the file is valid and its policy is in force now.

        Otherwise sets `last_error` and keeps `current`. The file is read and checked in a thread. The policy is
        replaced in one step on the event loop.
        """
        async with self._lock:
            self._stamp = _stamp(self.path)
            try:
                policy = await asyncio.to_thread(self._load)
            except PolicyError as error:
                self.last_error = error
                self.reloads_refused += 1
                log.error("policy file rejected, policy %s stays in force:\n%s", self.current.hash, error)
                for refused in self._refusal_listeners:
                    refused()
                return False
            self.last_error = None
            self.reloads_accepted += 1
            if policy.hash != self.current.hash:
                log.info("policy %s in force, replaces %s", policy.hash, self.current.hash)
                self.current = policy
                self.loaded_ns = time.time_ns()
                for listener in self._listeners:
                    listener(policy)
            else:
                log.info("policy %s stays in force: the content of the file is unchanged", policy.hash)
            return True

    async def watch(self, *, every_seconds: float = WATCH_SECONDS) -> None:
        """Reload if the file's content changes, and on SIGHUP in any case. Runs until cancelled."""
        hangup = asyncio.Event()
        with _on_hangup(hangup):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(hangup.wait(), every_seconds)
                if hangup.is_set() or await self._has_changed():
                    hangup.clear()
                    await self.reload()

    def _load(self) -> Policy:
        self._digest = ""  # stays if the file cannot be read
        content = read_policy(self.path)
        self._digest = content_digest(content)
        return parse_policy(content, file=str(self.path), checks=self.checks)

    async def _has_changed(self) -> bool:
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return False
        # A touch changes the stamp but not the content, and must not cause a reload.
        self._stamp = stamp
        return await asyncio.to_thread(self._digest_now) != self._digest

    def _digest_now(self) -> str:
        try:
            return content_digest(read_policy(self.path))
        except PolicyError:
            return "unreadable"  # differs from every digest, so that a file that disappears is reported


def _stamp(path: FilePath) -> tuple[int, ...]:
    """Return modification time, size and inode, which change if the file is changed or replaced. Empty if missing."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def content_digest(content: bytes) -> str:
    """The SHA-256 of a policy file's content. Unlike `Policy.hash`, it also changes with comments."""
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _on_hangup(event: asyncio.Event) -> Iterator[None]:
    """Set `event` on SIGHUP. Does nothing without POSIX, or outside the main thread, which alone handles signals."""
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, event.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


__all__ = [
    "PolicyError",
    "PolicyHolder",
    "Problem",
    "content_digest",
    "findings",
    "load_located",
    "load_policy",
    "parse_policy",
    "policy_schema",
    "read_policy",
    "warnings_of",
]
