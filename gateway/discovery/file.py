"""Source: a file in the form of Prometheus' file_sd, in JSON or YAML.

    - targets: ["10.0.0.5:8000", "10.0.0.6:8000"]
      labels: {model: llama-3.3-70b}

The label `name` names the only target of its group, so that it keeps its identity if its address changes.
https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config describes the form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import yaml

from gateway.deployments.instances import Instance
from gateway.discovery.base import InstanceSource, SourceError, Update, split_address
from gateway.policy import Secret
from gateway.providers.transport import HTTPTransport

FILE_MAX_BYTES = 4 * 1024 * 1024
LOOK_SECONDS = 1.0  # between two looks at the file
NAME_LABEL = "name"


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    targets: list[str]
    labels: dict[str, str] = {}


class FileSource(InstanceSource):
    """Reads the file again if it changes. A file that is missing or invalid is an error, not an empty list."""

    def __init__(self, path: str, _transport: HTTPTransport, _resolve_secret: Callable[[Secret], str]) -> None:
        self._path = Path(path)
        self._content: bytes | None = None
        self.description = f"file {path}"

    async def follow(self, update: Update) -> None:
        self._content = None
        found: list[Instance] = []
        while True:
            # Comparing the content instead of its time also finds two changes within one tick of the clock.
            content = await asyncio.to_thread(self._read)
            if content != self._content:
                found = await asyncio.to_thread(self._parse, content)
                self._content = content
            update(found)
            await asyncio.sleep(LOOK_SECONDS)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_MAX_BYTES + 1)
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or type(error).__name__}") from None
        if len(content) > FILE_MAX_BYTES:
            raise SourceError(f"is longer than {FILE_MAX_BYTES} bytes")
        return content

    def _parse(self, content: bytes) -> list[Instance]:
        try:
            if self._path.suffix == ".json":
                groups = msgspec.json.decode(content, type=list[_Group])
            else:
                groups = msgspec.convert(yaml.safe_load(content) or [], list[_Group])
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f" in line {mark.line + 1}" if mark is not None else ""
            raise SourceError(f"is not YAML: error{where}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SourceError(f"is not in the form of file_sd: {error}") from None
        return list(_instances(groups))


def _instances(groups: list[_Group]) -> list[Instance]:
    found: dict[str, Instance] = {}
    for number, group in enumerate(groups):
        name = group.labels.get(NAME_LABEL, "")
        if name and len(group.targets) > 1:
            raise SourceError(
                f"group {number}: the label name is for a group with one target, not {len(group.targets)}"
            )
        for target in group.targets:
            try:
                host, port = split_address(target)
            except ValueError as error:
                raise SourceError(f"group {number}: {target!r}: {error}") from None
            instance = Instance(name or target, name or target, host, port, group.labels)
            if found.setdefault(instance.name, instance).address != instance.address:
                raise SourceError(f"group {number}: the name {name!r} is used twice")
    return list(found.values())
