"""The page docs/reference/servers.md: what servers support and how that is tested, from the code and the tests."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.policy.deployments import NATIVE_PROVIDERS
from gateway.providers import CACHE_SALT_PROVIDERS, PROVIDERS
from gateway.providers.openai import OpenAI
from gateway.providers.translation import TranslatingProvider
from gateway.types import Operation
from tests.contract.test_media import OUTCOMES
from tests.servers.contract import CONTRACT

ROOT = Path(__file__).parents[1]
HOSTED = ROOT / "tests" / "contract" / "test_hosted_servers.py"
RAN = ROOT / "tests" / "servers" / "results.json"
RUN_FOR_REAL = ("warmpath",)  # providers whose server runs in the end-to-end tests
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

"""
RAN_INTRODUCTION = """
## Servers that were run

`make test-servers` installs these servers, starts each with the bundled model, and checks one contract through the
gateway: chats, streams, usage, tools, cached tokens, and errors in OpenAI's form.

"""
HOSTED_INTRODUCTION = """
## Hosted services and variants of OpenAI's API

The streams, usage fields and errors of these services are golden wires in `tests/contract/test_hosted_servers.py`, from
their documentation and from reports of their users. No test calls a hosted service.

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
    listed = re.findall(r'^    "([a-z.-]+)": Service', HOSTED.read_text(), re.M)
    media = MEDIA_INTRODUCTION + "".join(_media_rows())
    ran = RAN_INTRODUCTION + "".join(_ran_rows())
    services = HOSTED_INTRODUCTION + "".join(f"* {name}\n" for name in listed)
    return INTRODUCTION + "".join(rows) + ran + media + services


def _ran_rows() -> Iterator[str]:
    results = json.loads(RAN.read_text())
    names = list(CONTRACT)
    yield f"| Server | Version | Provider | {' | '.join(names)} | Day |\n|---|---|---|{'---|' * len(names)}---|\n"
    for name, result in sorted(results.items()):
        found = [result["found"].get(part, "not checked") for part in names]
        yield f"| {name} | {result['version']} | `{result['provider']}` | {' | '.join(found)} | {result['day']} |\n"


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
        "the server itself" if name in RUN_FOR_REAL else "golden wires",
    )
    return f"| {' | '.join(cells)} |\n"


def _mark(supported: bool) -> str:
    return "yes" if supported else "no"
