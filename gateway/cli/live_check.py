"""What `warmpath check --live` asks of each deployment, and what it finds out.

Each deployment lists its models. Then it gets up to four short chats, as the gateway sends them: one, the same again,
the same with another cache salt, and one with a priority. Their usage shows what the server counts and caches. A
deployment with a role gets one more, whose prompt is computed by a prefill deployment. The servers of templates are
discovered first, as by a gateway that starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from gateway.billing.metering import Meter
from gateway.core.kv_transfer import PREFILL, read_answer
from gateway.core.supervision import Supervisor
from gateway.deployments.engine_reports import EngineReporter
from gateway.deployments.fleet import Fleet
from gateway.deployments.state import DeploymentState
from gateway.discovery.discovery import FIRST_LIST_SECONDS, Discovery
from gateway.policy import Deployment, Model, Policy, Tenant
from gateway.policy.roles import DECODE
from gateway.policy.wildcards import STAR
from gateway.prompts.canonicaliser import new_call_id
from gateway.providers import CACHE_SALT_PROVIDERS, make_provider
from gateway.providers.base import Provider, ProviderFailure
from gateway.providers.offline import OfflineProvider
from gateway.providers.setup_check import setup_problem
from gateway.providers.transport import HTTPTransport
from gateway.providers.transport.tls import UnusableFile
from gateway.settings import SettingsError, resolve_secret
from gateway.types import Call, Operation, Principal, Trace, Usage

CHECKED_AT_ONCE = 16
CALL_SECONDS = 60.0  # of one chat
EVENT_SECONDS = 3.0  # for events after the last chat
POLL_SECONDS = 0.1
ANSWER_TOKENS = 8
# Vendors cache prompts from 1,024 tokens; if a model's context is smaller, the shorter prompt is sent.
PROMPT_WORDS = (1_200, 150)
PRIORITY_PROVIDERS = frozenset({"sglang", "trtllm", "vllm"})  # that need an option of the server for priorities
PRIORITY = 1  # not the default, which servers accept without the option
NOT_CHECKED = "-"
CAPABILITIES = ("usage", "cached_tokens", "cache_salt", "priority", "kv_events")
ROLE = "role"  # a further one, of deployments with a role


@dataclass(slots=True)
class LiveResult:
    """What works at one deployment. `problem` is why a gateway would eject it. The other values are for people."""

    deployment: str
    problem: str | None = None
    found: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CAPABILITIES, NOT_CHECKED))


async def check_live(policy: Policy) -> list[LiveResult]:
    """Ask all deployments of a policy, in its order."""
    transport, supervisor = HTTPTransport(), Supervisor()
    unusable: dict[str, str] = {}
    make = partial(_provider_or_reason, transport, unusable)
    fleet = Fleet(make)
    fleet.apply(policy)
    discovery = Discovery(fleet, transport, resolve_secret, make, supervisor)
    discovery.apply(policy)
    following = supervisor.start("discovery", discovery.run)
    places = asyncio.Semaphore(CHECKED_AT_ONCE)

    async def check(state: DeploymentState) -> LiveResult:
        async with places:
            if state.name in unusable:
                return LiveResult(state.name, unusable[state.name])
            return await _Check(policy, state, fleet, transport, supervisor).run()

    try:
        await _until_discovered(policy, discovery)
        results = await asyncio.gather(*map(check, fleet))
        return [*results, *_without_servers(policy, fleet, discovery)]
    finally:
        await following.cancel()
        await transport.aclose()


def _provider_or_reason(transport: HTTPTransport, unusable: dict[str, str], deployment: Deployment) -> Provider:
    try:
        return make_provider(deployment, transport, resolve_secret)
    except (SettingsError, UnusableFile) as error:
        unusable[deployment.name] = str(error)
        return OfflineProvider()


async def _until_discovered(policy: Policy, discovery: Discovery) -> None:
    templates = sum(deployment.source is not None for deployment in policy.deployments)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_LIST_SECONDS):
            while sum(follower.is_settled for follower in discovery) < templates:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(POLL_SECONDS)


def _without_servers(policy: Policy, fleet: Fleet, discovery: Discovery) -> list[LiveResult]:
    """The templates that have no servers, and why."""
    entries = {state.entry for state in fleet}
    reasons = {follower.template.name: follower.failure for follower in discovery}
    return [
        LiveResult(deployment.name, reasons.get(deployment.name) or "its source names no server")
        for deployment in policy.deployments
        if deployment.source is not None and deployment.name not in entries
    ]


class _Check:
    """The check of one deployment."""

    def __init__(
        self, policy: Policy, state: DeploymentState, fleet: Fleet, transport: HTTPTransport, supervisor: Supervisor
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._state = state
        self._config = state.config
        self._provider = state.provider
        self._reporter = EngineReporter(state, transport, resolve_secret, supervisor)
        self._make_provider = partial(make_provider, transport=transport, resolve_secret=resolve_secret)
        self._nonce = secrets.token_hex(8)  # no cache holds this check's prompt
        self._words = PROMPT_WORDS[0]
        self._salts = (secrets.token_hex(8), secrets.token_hex(8))
        self._implausible: str | None = None  # why the newest chat's counts are
        self._result = LiveResult(state.name)

    async def run(self) -> LiveResult:
        result, found = self._result, self._result.found
        result.problem = await setup_problem(self._provider, self._config)
        if result.problem is not None:
            return result
        if STAR in self._config.model:
            found["usage"] = "not checked: its model has a *"
            return result
        self._reporter.start()
        try:
            await self._ask_chats()
            if self._config.role is not None:
                found[ROLE] = await self._role()
            found["kv_events"] = await self._events()
        finally:
            await self._reporter.stop()
        return result

    async def _ask_chats(self) -> None:
        found = self._result.found
        try:
            usage = await self._first_chat()
            why = f"implausible: {self._implausible}" if self._implausible else "not reported; the gateway estimates it"
            found["usage"] = "reported" if usage.exact else why
            again = await self._chat(self._salts[0])
            found["cached_tokens"] = _cached(again)
            if self._config.provider in CACHE_SALT_PROVIDERS:
                other = await self._chat(self._salts[1])
                found["cache_salt"] = _isolation(again, other)
        except ProviderFailure as failure:
            found["usage"] = f"a chat failed: {failure.log_message}"
            return
        found["priority"] = await self._priority()

    async def _first_chat(self) -> Usage:
        try:
            return await self._chat(self._salts[0])
        except ProviderFailure as failure:
            if failure.reason != "context":
                raise
            self._words = PROMPT_WORDS[1]
            return await self._chat(self._salts[0])

    async def _priority(self) -> str:
        """Whether the server obeys priorities. An engine that was not started for them rejects them."""
        if self._config.provider == "warmpath" or self._config.priorities:
            return "sent and accepted"
        if self._config.provider not in PRIORITY_PROVIDERS:
            return NOT_CHECKED
        provider = self._make_provider(self._config.model_copy(update={"priorities": True}))
        try:
            await self._chat(self._salts[0], provider)
        except ProviderFailure:
            return "the server was not started with it"
        return "accepted, but not sent: set priorities: true"

    async def _role(self) -> str:
        """Whether the deployment hands a prompt over to others, or loads one from a prefill deployment."""
        call = self._call(secrets.token_hex(8))
        sources = [self._state]
        if self._config.role == DECODE:
            sources = [*self._fleet.prefill_deployments_of(call.model)]
        if not sources:
            return "there is no prefill deployment now"
        source, *_ = sources
        try:
            params = await _prefill(source.provider, call)
            if params is None:
                return f"{source.name} answers no kv_transfer_params"
            if source is self._state:
                return "hands prompts over"
            usage = await self._stream(msgspec.structs.replace(call, kv_transfer=params), self._provider)
        except ProviderFailure as failure:
            return f"failed: {failure.log_message}"
        if usage.cache_read:
            return f"loads prompts from {source.name} ({usage.cache_read} of {usage.input} tokens)"
        return f"loads nothing from {source.name}, or does not report it"

    async def _events(self) -> str:
        if self._config.kv_events is None:
            return NOT_CHECKED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVENT_SECONDS):
                while not self._reporter.counts.batches:  # noqa: ASYNC110 - the reporter sets no event
                    await asyncio.sleep(POLL_SECONDS)
        counts = self._reporter.counts
        if counts.batches:
            return f"received ({counts.batches} batches)"
        return "not in vLLM's format" if counts.malformed else f"none within {EVENT_SECONDS:g} s"

    async def _chat(self, salt: str, provider: Provider | None = None) -> Usage:
        """Stream one chat, and return its usage. Raises `ProviderFailure`."""
        return await self._stream(self._call(salt), provider or self._provider)

    async def _stream(self, call: Call, provider: Provider) -> Usage:
        meter = Meter(call, self._config)
        async with asyncio.timeout(CALL_SECONDS):
            upstream = await provider.open(call, headers={"x-request-id": call.id})
            try:
                async for chunk in upstream:
                    meter.watch(chunk)
            finally:
                await upstream.aclose()
        usage, self._implausible = meter.usage, meter.implausible
        return usage

    def _call(self, salt: str) -> Call:
        policy, entry = self._policy, self._state.entry
        model = next((each for each in policy.models if entry in each.deployments), None)
        model = model or Model(name=self._config.model, deployments=(entry,))
        text = f"Check {self._nonce}. Say hello. Ignore this list: " + " ".join(
            f"item {number}" for number in range(self._words // 2)
        )
        latency_class = policy.classes[policy.default_class].model_copy(update={"priority": PRIORITY})
        return Call(
            id=new_call_id(),
            operation=Operation.CHAT,
            principal=Principal(Tenant(name="check"), "check"),
            policy=policy,
            asked_model=model.name,
            model=model,
            class_name=policy.default_class,
            latency_class=latency_class,
            stream=True,
            include_usage=True,
            max_output_tokens=ANSWER_TOKENS,
            deterministic=False,
            fields={
                "messages": msgspec.Raw(msgspec.json.encode([{"role": "user", "content": text}])),
                "max_tokens": msgspec.Raw(b"%d" % ANSWER_TOKENS),
                "stream": msgspec.Raw(b"true"),
            },
            fingerprint=(),
            prompt_tokens_estimate=len(text) // 4,
            cache_salt=salt,
            service_tier=None,
            end_user=None,
            canonical_steps=(),
            class_rule=None,
            deadline=asyncio.get_running_loop().time() + CALL_SECONDS,
            trace=Trace(secrets.randbits(128), 0, sampled=False),
        )


async def _prefill(provider: Provider, call: Call) -> msgspec.Raw | None:
    """Let a prefill deployment compute the prompt. Returns what another one needs to load it."""
    request = msgspec.structs.replace(call, kv_transfer=PREFILL, stream=False, max_output_tokens=1)
    async with asyncio.timeout(CALL_SECONDS):
        upstream = await provider.open(request, headers={"x-request-id": f"{call.id}-prefill"})
        try:
            return read_answer(await anext(upstream))[0]
        finally:
            await upstream.aclose()


def _cached(usage: Usage) -> str:
    if not usage.exact:
        return "unknown: no usage"
    if usage.cache_read:
        return f"reported ({usage.cache_read} of {usage.input} for a repeated prompt)"
    return "none for a repeated prompt: not cached, or not reported"


def _isolation(same: Usage, other: Usage) -> str:
    if not same.cache_read:
        return "unknown: no cached tokens"
    if other.cache_read < same.cache_read:
        return "isolates tenants"
    return "ignored: tenants share the cache"


def table(results: Sequence[LiveResult]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of the results: its head, and one row per deployment."""
    names = (*CAPABILITIES, *((ROLE,) if any(ROLE in each.found for each in results) else ()))
    head = ("DEPLOYMENT", "MODELS", *(name.upper().replace("_", " ") for name in names))
    rows = [
        (each.deployment, each.problem or "OK", *(each.found.get(name, NOT_CHECKED) for name in names))
        for each in results
    ]
    return head, rows


__all__ = ["CAPABILITIES", "ROLE", "LiveResult", "check_live", "table"]
