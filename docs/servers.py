"""The page docs/reference/servers.md: what servers support and how that is tested, from the code and the tests."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.policy.deployments import NATIVE_PROVIDERS
from gateway.providers import CACHE_SALT_PROVIDERS, PROVIDERS
from gateway.providers.openai import OpenAI
from gateway.providers.translation import TranslatingProvider
from gateway.types import Operation
from tests.contract.test_hosted_servers import SERVICES
from tests.contract.test_media import OUTCOMES
from tests.gateway.providers.wires import WIRES, Wire
from tests.servers.contract import CONTRACT

ROOT = Path(__file__).parents[1]
RAN = ROOT / "tests" / "servers" / "results.json"
RUN_FOR_REAL = ("warmpath",)  # providers whose server runs in the end-to-end tests
# The APIs of providers with wires of their own, and what shows that an answer has a feature.
NATIVE_APIS_OF = {"anthropic": "its own", "azure": "OpenAI's, with versions", "gemini": "its own", "ollama": "its own"}
WIRE_FEATURES = {
    "usage": (b"_tokens", b"TokenCount", b"eval_count"),
    "cached tokens": (b"cached_tokens", b"cache_hit_tokens", b"cache_read", b"cachedContent"),
    "reasoning": (b"reasoning", b"thought", b"thinking"),
    "tool calls": (b"tool_calls", b"tool_use", b"functionCall"),
}
NAMES = {Operation.CHAT: "chats", Operation.COMPLETION: "completions", Operation.EMBEDDING: "embeddings"}
INTRODUCTION = """# What servers support

This page is generated from the providers' code and from the tests (`python -m docs.generate`).
[Providers](providers.md) says how to configure each server.

## By provider

* **Operations**: what the provider sends. Chats include streams, tools and images, as far as the server has them.
* **Passes**: API formats of clients whose requests pass unchanged, with `native` in the policy where it is not the
  provider's own, and other endpoints, such as reranks and audio.
* **Counts prompts**: the tokenizer of the server counts prompts, for the token counting endpoints and for bills.
* **Resumes**: a cut stream of another deployment can be continued.
* **Salts**: the prefix caches of tenants are isolated.
* **Priorities**: the latency class's priority is sent.
* **Tested with**: servers that `make test-servers` has run, and scripted answers (golden wires).

"""
RAN_INTRODUCTION = """
## Servers that were run

`make test-servers` installs these servers from the package index, starts each as a process with a small model that this
repository makes, and checks one contract through the gateway. Chats, embeddings and reranks each have their own checks,
and errors must have OpenAI's form. A dash means that the check is not for this server.

"""
HOSTED_INTRODUCTION = """
## Servers and services by golden wires

Their streams, usage fields and errors are scripted in `tests/contract/`, from their documentation and from reports of
their users. No test runs the server or calls the service. TensorRT-LLM, SGLang and LMDeploy need a GPU, and OpenVINO
Model Server and Ollama are in no package index that the tests use. The table says which features the scripted answers
have. `tests/gateway/providers/` tests tools, thinking and media of Anthropic's, Gemini's and Ollama's APIs by field.

"""
MEDIA_INTRODUCTION = """
## Media

How a server gets the images, sound, video and files of a request: as **data**, by the **URL** that the server fetches,
or as **text**. A medium by URL that is refused here is sent as data if `media_fetch` of the policy allows its host
([how-to](../how-to/connect-deployments.md#media-by-url)); by default the gateway fetches nothing. An error names the
field of a medium that is refused. If another deployment or a fallback of the model takes it, the request goes there.
Servers with OpenAI's API judge chats themselves. Requests that pass unchanged (`native`) may contain everything that
their API has. Bodies are bounded by `WARMPATH_MAX_BODY_BYTES`, and a prompt may have 4,096 media. Their tokens are
counted by the formulas of `media` in the policy, until the server reports them. The table is checked by
`tests/contract/test_media.py`.

"""
MEDIA_PROVIDERS = ("openai", "anthropic", "gemini", "ollama")
MEDIA_FORMS = ("data", "URL", "text")


def servers_page() -> str:
    """The page: a table of providers, a table of media, and the list of services with golden wires."""
    rows = [
        "| Provider | Operations | Passes | Counts prompts | Resumes | Salts | Priorities | Tested with |\n",
        "|---|---|---|---|---|---|---|---|\n",
        *(_row(name, path) for name, path in sorted(PROVIDERS.items())),
    ]
    media = MEDIA_INTRODUCTION + "".join(_media_rows())
    ran = RAN_INTRODUCTION + "".join(_ran_rows())
    services = HOSTED_INTRODUCTION + "".join(_wire_rows())
    return INTRODUCTION + "".join(rows) + ran + media + services


def _ran_rows() -> Iterator[str]:
    names = [name for name in CONTRACT if " of " not in name]
    yield f"| Server | Version | Provider | {' | '.join(names)} | Day |\n|---|---|---|{'---|' * len(names)}---|\n"
    for name, result in sorted(_results().items()):
        found = [result["found"].get(part, "-") for part in names]
        yield f"| {name} | {result['version']} | `{result['provider']}` | {' | '.join(found)} | {result['day']} |\n"


def _wire_rows() -> Iterator[str]:
    yield f"| Server or service | API | Provider | {' | '.join(WIRE_FEATURES)} |\n"
    yield f"|---|---|---|{'---|' * len(WIRE_FEATURES)}\n"
    wires = {name: (NATIVE_APIS_OF[name], name, _bytes_of(wire)) for name, wire in WIRES.items()}
    wires |= {
        f"{name} ": ("OpenAI's", service.deployment.get("provider", "openai"), b"".join(service.stream))
        for name, service in SERVICES.items()
    }
    for name, (api, provider, sent) in sorted(wires.items()):
        marks = ["yes" if any(mark in sent for mark in known) else "-" for known in WIRE_FEATURES.values()]
        yield f"| {name.strip()} | {api} | `{provider}` | {' | '.join(marks)} |\n"


def _bytes_of(wire: Wire) -> bytes:
    return b"".join(value for value in vars(wire).values() if isinstance(value, bytes))


def _media_rows() -> Iterator[str]:
    yield "| Endpoint | Medium | OpenAI's API | `anthropic` | `gemini` | `ollama` |\n|---|---|---|---|---|---|\n"
    for (endpoint, medium), outcomes in OUTCOMES.items():
        cells = [outcomes[provider] for provider in MEDIA_PROVIDERS]
        said = [cell if cell in MEDIA_FORMS else "id" if cell.startswith("file-") else "refused" for cell in cells]
        yield f"| `/v1/{endpoint}` | {medium} | {' | '.join(said)} |\n"


def _row(name: str, path: str) -> str:
    module, _, attribute = path.partition(":")
    provider: Any = getattr(importlib.import_module(module), attribute)
    translates = issubclass(provider, TranslatingProvider)
    operations = provider.operations if translates else NAMES
    passes = [api for api, providers in NATIVE_PROVIDERS.items() if name in providers]
    passes += [] if translates else ["other endpoints"]
    own = getattr(provider, "reserved_fields", ())  # fields that the gateway sets itself
    counts = provider.count_prompt_tokens is not OpenAI.count_prompt_tokens
    cells = (
        f"`{name}`",
        ", ".join(NAMES[operation] for operation in operations),
        ", ".join(passes) or "nothing",
        _mark(counts),
        _mark(provider.continues_final_message),
        "chats only" if "cache_salt" in own and name not in CACHE_SALT_PROVIDERS else _mark("cache_salt" in own),
        _mark("priority" in own),
        _tested_with(name),
    )
    return f"| {' | '.join(cells)} |\n"


def _tested_with(provider: str) -> str:
    ran = {name.partition(",")[0] for name, result in _results().items() if result["provider"] == provider}
    return "the server itself" if provider in RUN_FOR_REAL else ", ".join([*sorted(ran), "golden wires"])


def _results() -> dict[str, Any]:
    """What `make test-servers` found, by server."""
    results: dict[str, Any] = json.loads(RAN.read_text())
    return results


def _mark(supported: bool) -> str:
    return "yes" if supported else "no"
