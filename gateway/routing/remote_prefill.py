"""Lets a prefill deployment compute a call's prompt before a decode deployment answers the call.

The policy gives the deployments of a model a `role`. A call goes to a decode deployment, which the strategy chooses as
if it computed the prompt itself, so conversations stay where their prefix is. If the uncached part of the prompt is
predicted to take that deployment longer than `routing.remote_prefill_above`, a prefill deployment gets the prompt first
(`gateway/core/kv_transfer.py` has the contract). The decode deployment then loads the keys and values from it.

So long prompts do not delay the answers that are in progress at the decode deployment. If no prefill deployment has a
free slot, or if it fails, is late or does not say how to load the prompt, the decode deployment computes the prompt: a
prefill deployment can cost a call time, but no answer. It is late after `LATE_FACTOR` times the predicted time, and
gets at most `TTFT_SHARE` of the time to the first chunk.

The call's slot moves with it: during the prefill, the call has a slot of the prefill deployment, and the slot of the
decode deployment serves another call. Afterwards it gets the first one that becomes free there, before queued calls. It
keeps the prefill deployment's slot until then, so prompts that wait for a decode deployment are bounded by these slots.
There is one prefill for each call. Its attempt is opened in
the ledger as any other. The prompt is billed once, as the prefill deployment counted it
(`gateway/billing/prefilled_prompt.py`). A client that disconnects during the prefill is billed for that.
"""

from __future__ import annotations

from functools import partial

import msgspec

from gateway.core.errors import UpstreamRefused
from gateway.core.kv_transfer import PREFILL, read_answer
from gateway.deployments.fleet import Fleet
from gateway.deployments.slot_permit import SlotPermit
from gateway.deployments.state import DeploymentState
from gateway.policy import Floor
from gateway.policy.roles import DECODE
from gateway.providers.usage import normalize_usage
from gateway.providers.usage.base import RawUsage
from gateway.routing.attempt_log import AttemptLog
from gateway.routing.attempt_runner import TTFT_SHARE, AttemptRunner
from gateway.routing.base import Candidate, Strategy
from gateway.routing.block_source import with_block_source
from gateway.routing.upstream import Upstream
from gateway.types import Call, Operation, Usage

# With these, the decode deployment needs the output of the model for each token of the prompt, so it computes them all.
_WHOLE_PROMPT_FIELDS = frozenset({"prompt_logprobs", "echo"})
_FINDS_BY_HASH = frozenset({"warmpath"})  # providers whose blocks can be loaded several times, for any prompt
_ONE = (b"1", b"null")

LATE_FACTOR = 5.0  # times the predicted time of the prefill and of the prompts before it
LATE_MIN_SECONDS = 5.0  # a prefill is not late before

_usage = msgspec.json.Decoder(RawUsage | None)


class RemotePrefill:
    """Plans and runs prefills at prefill deployments. Shared by all calls; owned by the event loop."""

    def __init__(self, fleet: Fleet, runner: AttemptRunner) -> None:
        self._fleet = fleet
        self._runner = runner

    async def prepare(
        self,
        call: Call,
        candidate: Candidate,
        candidates: list[Candidate],
        strategy: Strategy,
        permit: SlotPermit,
        deadline: float,
        attempts: AttemptLog,
    ) -> Candidate | None:
        """The candidate with the deployment from which it should load the prompt, which then has computed it.

        Unchanged if the candidate should compute the prompt itself. None if its deployment had no free slot in time
        after the prefill; otherwise, `permit` has a slot there. Raises `LedgerUnavailable`.
        """
        now = attempts.loop.time()
        ranked = self._rank(call, candidate.deployment, strategy, now)
        if call.has_prefix:
            candidate = with_block_source(call.fingerprint, candidate, [*candidates, *ranked], now)
        chosen = None if attempts.prefills else _choose(call, candidate, ranked, now)
        if chosen is None or not permit.move_to(chosen.deployment):
            return candidate
        last_deployment = attempts.last_deployment
        params = await self._run(call, chosen, deadline, attempts)
        if not permit.move_to(candidate.deployment):
            seconds = deadline - attempts.loop.time()
            await self._fleet.move_when_slot_free(permit, [candidate.deployment], seconds)
        attempts.last_deployment = last_deployment  # the prefill is not billed, unless it is cancelled
        if not permit.is_at(candidate.deployment):
            return None
        if params is None:
            return candidate
        prediction = chosen.deployment.predict_cache(call.fingerprint, attempts.loop.time())
        source = msgspec.structs.replace(chosen, matched_tokens=chosen.prompt_tokens, prediction=prediction)
        return msgspec.structs.replace(candidate, block_source=source, kv_transfer=params)

    async def run_prepared(
        self,
        call: Call,
        prepared: Candidate,
        candidate: Candidate,
        deadline: float,
        attempts: AttemptLog,
        floor: Floor | None,
        *,
        in_own_task: bool = False,
    ) -> Upstream | None:
        """Run an attempt of `prepared`. If the deployment rejects it, run it as it was before: `candidate`.

        It may be the params to load blocks that it rejects, because it was started without the option to load any.
        """
        run = partial(self._runner.run, call, in_own_task=in_own_task)
        if prepared.block_source is None:
            return await run(prepared, deadline, attempts, floor)
        try:
            return await run(prepared, deadline, attempts, floor)
        except UpstreamRefused as refusal:
            upstream = await run(candidate, deadline, attempts, floor)
            reason = f"it rejected kv_transfer_params with status {refusal.upstream_status}; does it load blocks?"
            candidate.deployment.failures.failed("no_kv_transfer", reason, call.id, attempts.loop.time())
            candidate.deployment.pause_loads(attempts.loop.time())
            return upstream

    def choose(self, call: Call, candidate: Candidate, strategy: Strategy, now: float) -> Candidate | None:
        """The prefill deployment that would compute the prompt, for explanations. Changes no state."""
        return _choose(call, candidate, self._rank(call, candidate.deployment, strategy, now), now)

    def _rank(self, call: Call, deployment: DeploymentState, strategy: Strategy, now: float) -> list[Candidate]:
        """The prefill deployments from which this deployment can load prompts, best first."""
        if deployment.role != DECODE or not call.has_prefix:
            return []
        models = (call.model, *(call.policy.models_by_name[name] for name in call.model.all_fallbacks))
        model = next((one for one in models if deployment in self._fleet.deployments_of(one)), None)
        served = deployment.config.model_for(call.wildcard)
        able = [
            one
            for one in (() if model is None else self._fleet.prefill_deployments_of(model))
            if one.config.model_for(call.wildcard) == served and one.provider.unsupported_error(call) is None
        ]
        return strategy.order(call, able, now)

    async def _run(self, call: Call, chosen: Candidate, deadline: float, attempts: AttemptLog) -> msgspec.Raw | None:
        """Let a prefill deployment compute the prompt. Returns what the decode deployment needs to load it."""
        deployment, loop, done = chosen.deployment, attempts.loop, len(attempts.done)
        now = loop.time()
        limit_seconds = _limit_seconds(call, chosen)
        due = min(now + limit_seconds, now + TTFT_SHARE * (deadline - now))
        computed: Usage | None = None
        try:
            request = _prefill_call(call, due, limit_seconds)
            upstream = await self._runner.run(request, chosen, due, attempts, None)
            if upstream is None:
                return None
            params, usage = read_answer(upstream.first_chunk_bytes)
            computed = _read_usage(usage) or Usage(input_uncached=call.input_tokens_estimate)
            await _finish(call, upstream, computed)
        except UpstreamRefused:  # perhaps of what only this engine lacks: the decode deployment decides
            return None
        finally:  # on every way out, cancellation included
            if len(attempts.done) > done:
                attempts.mark_prefill(computed)
        if params is None:
            reason = "its answer has no kv_transfer_params; does it run with a KV connector?"
            deployment.failures.failed("no_kv_transfer", reason, call.id, loop.time())
        return params


def _choose(call: Call, candidate: Candidate, ranked: list[Candidate], now: float) -> Candidate | None:
    """The prefill deployment that should compute the prompt. None if the candidate should, or none can in time."""
    if not ranked or call.media is not None or not call.fields.keys().isdisjoint(_WHOLE_PROMPT_FIELDS):
        return None
    deployment, source = candidate.deployment, candidate.block_source
    if call.native is not None and call.native.api in deployment.config.native_apis:
        return None  # it is sent in the client's API, whose prompt may differ
    if deployment.config.provider not in _FINDS_BY_HASH and not _is_one_sequence(call):
        return None
    held_tokens = candidate.matched_tokens if source is None else source.matched_tokens
    estimate = deployment.estimate
    work = estimate.speed.work(held_tokens, call.prompt_tokens_estimate)
    if work / estimate.prefill_tokens_per_second <= call.policy.routing.remote_prefill_above:
        return None
    free = (one for one in ranked if one.deployment.breaker.would_admit(now) and one.deployment.has_slot)
    limit_seconds = TTFT_SHARE * call.latency_class.ttft
    # One that has failed a moment ago is not tried again by each call: the decode deployment is the alternative.
    usable = (one for one in free if one.ttft_seconds < limit_seconds and not one.deployment.is_deprioritised(now))
    return next(usable, None)


def _is_one_sequence(call: Call) -> bool:
    """Whether the answer has one choice, for one prompt. vLLM's params describe the blocks of one sequence.

    Its prefill engine frees them as soon as the first choice has read them.
    """
    fields = call.fields
    if any(bytes(fields[name]) not in _ONE for name in ("n", "best_of") if name in fields):
        return False
    return call.operation is Operation.CHAT or bytes(fields.get("prompt", b"")).startswith(b'"')


def _limit_seconds(call: Call, chosen: Candidate) -> float:
    """How long a prefill may take. If the strategy does not predict the time (0), it may take the whole share."""
    share = TTFT_SHARE * call.latency_class.ttft
    return min(share, max(LATE_MIN_SECONDS, LATE_FACTOR * chosen.ttft_seconds)) if chosen.ttft_seconds else share


def _prefill_call(call: Call, deadline: float, limit_seconds: float) -> Call:
    """The request to a prefill deployment, which is at fault if it had `limit_seconds` and did not answer."""
    limits = call.latency_class.model_copy(update={"total": limit_seconds, "hedge": None})
    return msgspec.structs.replace(
        call, kv_transfer=PREFILL, stream=False, max_output_tokens=1, native=None, latency_class=limits,
        deadline=deadline,
    )  # fmt: skip


def _read_usage(usage: bytes) -> Usage | None:
    try:
        raw = _usage.decode(usage)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return None if raw is None else normalize_usage(raw)


async def _finish(call: Call, upstream: Upstream, computed: Usage) -> None:
    """Let the deployment's estimates learn from the answer, and end the call there."""
    deployment, sent = upstream.deployment, upstream.sent
    deployment.breaker.completed()
    if computed.exact:
        deployment.add_billed(computed)
        sent.learn_cached(computed.input, computed.cache_read)
        sent.learn_usage(call.id, computed.input, computed.cache_read, 0)  # of one token, no speed can be learned
    await upstream.aclose()
