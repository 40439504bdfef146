"""Checks if a deployment's address, key and model name are right, by its list of models. Generates nothing."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.policy import Deployment
from gateway.policy.wildcards import STAR
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.openai import OpenAI

CHECK_SECONDS = 5.0
NAMES_SHOWN_MAX = 5


class _Model(msgspec.Struct):
    id: str = ""


class _ModelList(msgspec.Struct):
    data: list[_Model] = []


_model_list = msgspec.json.Decoder(_ModelList).decode


async def setup_problem(provider: OpenAI, deployment: Deployment) -> str | None:
    """What is wrong with a configuration for which the gateway would eject the deployment, or None."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            names = [model.id for model in _model_list(await provider.fetch_models()).data]
    except TimeoutError:
        return f"no answer within {CHECK_SECONDS:g} s"
    except ProviderFailure as failure:
        if failure.fault is Fault.CONNECT:
            return f"connection failed: {failure.log_message}"
        if failure.status == 404:
            return "status 404: it has no list of models; is /v1 or another path missing in base_url?"
        return failure.log_message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "its list of models is not in OpenAI's format"
    if names and provider.lists_deployments and STAR not in deployment.model and deployment.model not in names:
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")
        return f"it does not list the model {deployment.model!r}, but {shown}"
    return None
