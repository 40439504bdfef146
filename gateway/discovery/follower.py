"""`Follower` follows the source of one template, and passes its servers to the fleet.

While the source fails, the last good list stays in use. The source is tried again after a pause, which doubles up to
`RETRY_MAX_SECONDS`. A failure is logged once, until the source works again or fails for another reason.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from gateway.deployments.fleet import Fleet
from gateway.deployments.instances import Instance
from gateway.discovery import make_source
from gateway.discovery.base import InstanceSource, SourceError
from gateway.discovery.model_names import RETRY_SECONDS, ModelNames
from gateway.policy import Deployment, Secret
from gateway.providers.base import Provider
from gateway.providers.transport import HTTPTransport

RETRY_MIN_SECONDS = 0.5
RETRY_MAX_SECONDS = 30.0

log = logging.getLogger("warmpath")


class Follower:
    """One template's source. `run` follows it until cancelled. The other attributes are for /ready and metrics."""

    def __init__(
        self,
        template: Deployment,
        fleet: Fleet,
        transport: HTTPTransport,
        resolve_secret: Callable[[Secret], str],
        make_provider: Callable[[Deployment], Provider],
    ) -> None:
        self.template = template
        self.error: str | None = None  # why the source cannot be read now
        self.instances = 0  # in use
        self.ignored = 0  # beyond `max_instances`
        self.changes = 0
        self.failures = 0
        self.read_at: float | None = None  # monotonic seconds of the last successful read
        self._fleet = fleet
        self._transport = transport
        self._resolve_secret = resolve_secret
        self._models = ModelNames(template, make_provider)
        self._found: tuple[Instance, ...] = ()
        self._published: tuple[Instance, ...] | None = None
        self._changed = asyncio.Event()
        self._source: InstanceSource | None = None

    @property
    def has_list(self) -> bool:
        """Whether the source has been read once."""
        return self._published is not None

    @property
    def is_settled(self) -> bool:
        """Whether the source has been read, and the model of every server is known or could not be read."""
        return self.has_list and all(each.name in self._models.failures for each in self._models.unknown(self._found))

    @property
    def failure(self) -> str | None:
        """Why there are no servers, or fewer: the source's error, or why a server's model could not be read."""
        return self.error or next((f"{name}: {why}" for name, why in sorted(self._models.failures.items())), None)

    @property
    def description(self) -> str:
        """The source in words."""
        if self._source is not None:
            return self._source.description
        config = self.template.source
        assert config is not None
        return f"file {config.file}" if config.file is not None else "DNS" if config.dns is not None else "Kubernetes"

    async def run(self) -> None:
        """Follow the source, and ask for the models of new servers, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._ask_models())

    async def _follow(self) -> None:
        config, pause_seconds = self.template.source, RETRY_MIN_SECONDS
        assert config is not None
        while True:
            tried_at = time.monotonic()
            try:
                if self._source is None:
                    self._source = make_source(config, self._transport, self._resolve_secret)
                await self._source.follow(self._take)
            except SourceError as error:
                if self.read_at is not None and self.read_at >= tried_at:
                    pause_seconds = RETRY_MIN_SECONDS  # it has worked in between
                self._failed(str(error))
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))
            pause_seconds = min(2 * pause_seconds, RETRY_MAX_SECONDS)

    def _failed(self, reason: str) -> None:
        self.failures += 1
        if reason != self.error:
            kept = f"the last {self.instances} servers stay in use" if self.has_list else "no servers are known yet"
            log.error("discovery of %s, %s: %s; %s", self.template.name, self.description, reason, kept)
        self.error = reason

    def _take(self, found: Sequence[Instance]) -> None:
        config = self.template.source
        assert config is not None
        self.read_at = time.monotonic()
        if self.error is not None:
            log.info("discovery of %s, %s: it works again", self.template.name, self.description)
            self.error = None
        ordered = sorted(found, key=lambda instance: instance.name)
        kept, ignored = tuple(ordered[: config.max_instances]), max(0, len(ordered) - config.max_instances)
        if ignored != self.ignored:
            if ignored:
                log.warning(
                    "discovery of %s, %s: %d servers ignored, because max_instances is %d",
                    self.template.name, self.description, ignored, config.max_instances,
                )  # fmt: skip
            self.ignored = ignored
        if kept != self._found or self._published is None:
            self._found = kept
            self._publish()
            self._changed.set()

    def _publish(self) -> None:
        """Pass the servers whose models are known to the fleet, if they have changed."""
        complete = tuple(self._models.complete(self._found))
        if complete == self._published:
            return
        before = {each.name for each in self._published or ()}
        now = {each.name for each in complete}
        self._published = complete
        self.instances = len(complete)
        self.changes += 1
        log.info(
            "discovery of %s, %s: %d servers; new: %s; gone: %s", self.template.name, self.description, len(now),
            _shown(now - before), _shown(before - now),
        )  # fmt: skip
        self._fleet.set_instances(self.template.name, complete)

    async def _ask_models(self) -> None:
        while True:
            unknown = self._models.unknown(self._found)
            self._changed.clear()
            if not unknown:
                await self._changed.wait()
                continue
            await self._models.ask(unknown)
            self._publish()
            if self._models.unknown(self._found):
                await asyncio.sleep(RETRY_SECONDS)

    def state(self) -> dict[str, object]:
        """The state for /ready: has no secrets."""
        shown: dict[str, object] = {
            "source": self.description,
            "instances": self.instances,
            "status": "starting" if not self.has_list else "stale" if self.error is not None else "ok",
        }
        if self.error is not None:
            shown["error"] = self.error
        if self.read_at is not None:
            shown["age_seconds"] = round(time.monotonic() - self.read_at, 1)
        if self.ignored:
            shown["ignored"] = self.ignored
        if self._models.failures:
            shown["model_unknown"] = dict(sorted(self._models.failures.items())[:SHOWN_MAX])
        return shown


SHOWN_MAX = 8  # names in one log line, or in /ready


def _shown(names: set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN_MAX} more" if len(listed) > SHOWN_MAX else ""
    return ", ".join(listed[:SHOWN_MAX]) + more if listed else "none"
