"""Asks discovered servers which model they serve, if neither the policy nor the source says it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.deployments.instances import Instance, UnusableInstance, deployment_of, needs_model
from gateway.policy import Deployment
from gateway.providers.base import Provider
from gateway.providers.setup_check import ListingFailed, listed_models

ASKED_AT_ONCE = 16
RETRY_SECONDS = 2.0  # after which the request is repeated if there was no answer
UNKNOWN_MODEL = "-"


class ModelNames:
    """The model of each instance of one template. Requested once per address."""

    def __init__(self, template: Deployment, make_provider: Callable[[Deployment], Provider]) -> None:
        self._template = template
        self._make_provider = make_provider
        self._known: dict[tuple[str, str], str] = {}  # by identity and address
        self.failures: dict[str, str] = {}  # by the instance's name: why its model is not known

    def complete(self, instances: Sequence[Instance]) -> list[Instance]:
        """The instances whose model is known, with it. Forgets the models of all others."""
        present = {(each.identity, each.address) for each in instances}
        self._known = {key: model for key, model in self._known.items() if key in present}
        names = {each.name for each in instances}
        self.failures = {name: reason for name, reason in self.failures.items() if name in names}
        return [
            each if not needs_model(self._template, each) else replace(each, model=model)
            for each in instances
            if (model := self._known.get((each.identity, each.address), "")) or not needs_model(self._template, each)
        ]

    def unknown(self, instances: Sequence[Instance]) -> list[Instance]:
        """The instances whose model is not known yet."""
        return [
            each
            for each in instances
            if needs_model(self._template, each) and (each.identity, each.address) not in self._known
        ]

    async def ask(self, instances: Sequence[Instance]) -> None:
        """Ask the servers, some at a time. Those that do not answer have a reason in `failures`."""
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask_one(instance: Instance) -> None:
            async with places:
                try:
                    config = deployment_of(self._template, replace(instance, model=UNKNOWN_MODEL))
                    models = await listed_models(self._make_provider(config))
                except (ListingFailed, UnusableInstance) as error:
                    self.failures[instance.name] = str(error)
                    return
            if not models:
                self.failures[instance.name] = "its list of models is empty"
                return
            self.failures.pop(instance.name, None)
            self._known[instance.identity, instance.address] = models[0]

        await asyncio.gather(*map(ask_one, instances))
