"""Checks if a deployment's address, key and model name are right, by its list of models. Generates nothing."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from gateway.policy import Deployment
from gateway.policy.wildcards import STAR
from gateway.providers.base import Fault, Provider, ProviderFailure
from gateway.providers.openai import OpenAI

CHECK_SECONDS = 5.0
NAMES_SHOWN_MAX = 5


class _Model(msgspec.Struct):
    id: str = ""


class _ModelList(msgspec.Struct):
    data: list[_Model] = []


_model_list = msgspec.json.Decoder(_ModelList).decode


class ListingFailed(Exception):
    """A server's list of models cannot be read. The message says why."""


async def listed_models(provider: Provider) -> list[str]:
    """The names of the models that a server lists. Raises `ListingFailed`."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            # All providers are based on OpenAI's.
            return [model.id for model in _model_list(await cast(OpenAI, provider).fetch_models()).data]
    except TimeoutError:
        raise ListingFailed(f"no answer within {CHECK_SECONDS:g} s") from None
    except ProviderFailure as failure:
        if failure.fault is Fault.CONNECT:
            raise ListingFailed(f"connection failed: {failure.log_message}") from None
        if failure.status == 404:
            message = "status 404: it has no list of models; is /v1 or another path missing in base_url?"
            raise ListingFailed(message) from None
        raise ListingFailed(failure.log_message) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ListingFailed("its list of models is not in OpenAI's format") from None


async def setup_problem(provider: Provider, deployment: Deployment) -> str | None:
    """What is wrong with a configuration for which the gateway would eject the deployment, or None."""
    try:
        names = await listed_models(provider)
    except ListingFailed as error:
        return str(error)
    lists_deployments = cast(OpenAI, provider).lists_deployments
    if names and lists_deployments and STAR not in deployment.model and deployment.model not in names:
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
        return f"it does not list the model {deployment.model!r}, but {shown}"
    return None
