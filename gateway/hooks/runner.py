"""Runs the hooks of a policy. Without hooks in the policy, nothing here is called.

An async function runs on the event loop and must not block it. Any other function runs in a thread. If a function takes
longer than its `timeout`, the call no longer waits for it: a coroutine is cancelled, and a thread runs until it ends by
itself. The number of threads is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec

from gateway.core.errors import BadRequest, GatewayError, HookFailed, HookRejected
from gateway.core.timers import time_bound
from gateway.hooks import Answer, Reject, Request
from gateway.hooks.answers import HookedUpstream, held_answer
from gateway.policy import Policy
from gateway.policy.hooks import Hook
from gateway.policy.wildcards import names_include
from gateway.routing.upstream import Upstream
from gateway.types import Call, Principal

log = logging.getLogger("warmpath")

THREADS_MAX = 64  # functions that run in threads at once, those included for which no call waits any more
FUNCTIONS_MAX = 256  # that are kept after their import

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


@lru_cache(FUNCTIONS_MAX)
def find_function(path: str) -> Callable[[Any], Any]:
    """Import a function by `module:name`. Raises `ImportError`."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ImportError(f"the module {module} has no {name}") from None
    if not callable(found):
        raise ImportError(f"{path} is not a function")
    return found  # type: ignore[no-any-return]


class HookRunner:
    """Runs hooks. One per gateway process; owned by the event loop."""

    def __init__(self) -> None:
        self._threads = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by hook and outcome, since the start

    async def before(self, body: bytes, policy: Policy, path: str, call_id: str, principal: Principal) -> bytes:
        """Return the body after all `before` functions. Raises `HookRejected` and `HookFailed`."""
        hooks = [hook for hook in policy.hooks if hook.before is not None and _sees_tenant(hook, principal)]
        if not hooks:
            return body
        try:
            fields = _decode(body)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            if body.lstrip()[:1] == b"{":  # an endpoint may read only a part of it
                raise BadRequest("the body is not JSON that the policy's hooks can read") from None
            return body  # a form, or a body that the endpoint rejects
        model = fields.get("model")
        if not isinstance(model, str):
            return body
        for hook in hooks:
            if not _sees_model(hook, policy, model):
                continue
            # A copy, so that a function that fails half-way has changed nothing.
            request = Request(
                call_id, principal.tenant_name, principal.key_id, path.removeprefix("/v1/"), model, _decode(body)
            )  # fmt: skip
            result = await self._run(hook, str(hook.before), request)
            if result is None:
                continue
            if not isinstance(result, dict):
                await self._failed(hook, f"returned {type(result).__name__}, not a dict or None")
                continue
            try:
                body = _encode(result)
            except (TypeError, ValueError, OverflowError, RecursionError):
                await self._failed(hook, "returned a body that JSON cannot express")
        return body

    def _answer_hooks(self, call: Call) -> list[Hook]:
        if not call.has_prefix:  # only chats and completions have texts
            return []
        return [
            hook
            for hook in call.policy.hooks
            if hook.after is not None
            and _sees_tenant(hook, call.principal)
            and _sees_model(hook, call.policy, call.asked_model)
        ]

    async def after(self, call: Call, upstream: Upstream, bill: Callable[[bytes], None]) -> Upstream:
        """Read the whole answer, run the `after` functions, and return it as one chunk.

        `bill` gets an answer that is withheld from the client. Raises `HookRejected`, `HookFailed` and `UpstreamCut`.
        """
        if not (hooks := self._answer_hooks(call)):
            return upstream
        answer = await held_answer(call, upstream)
        try:
            for hook in hooks:
                if not answer.is_readable:
                    await self._failed(hook, "cannot read an answer in parts")
                    continue
                seen = Answer(
                    call.id, call.tenant_name, call.principal.key_id, call.asked_model, upstream.deployment.name,
                    tuple(answer.texts),
                )  # fmt: skip
                texts = await self._run(hook, str(hook.after), seen)
                if texts is not None and not _are_texts(texts, len(answer.texts)):
                    await self._failed(hook, f"must return {len(answer.texts)} texts or None")
                elif texts is not None:
                    answer.replace([*texts])
        except GatewayError:
            bill(answer.content)
            raise
        return cast(Upstream, HookedUpstream(upstream, answer.encoded()))  # it passes on what it does not define

    async def _run(self, hook: Hook, path: str, argument: Any) -> Any:
        """Call a function within the hook's time. Returns None if it failed and the policy continues."""
        try:
            async with time_bound(hook.timeout):
                function = find_function(path)
                if inspect.iscoroutinefunction(function):
                    result = await function(argument)
                else:
                    result = await self._in_thread(function, argument)
        except Reject as rejection:
            self.outcomes[hook.name, "rejected"] += 1
            raise HookRejected(hook.name, rejection.message, rejection.status) from None
        except TimeoutError:
            return await self._failed(hook, f"took longer than {hook.timeout:g} s")
        except Exception as error:
            log.exception("the hook %s failed", hook.name)
            return await self._failed(hook, f"failed with {type(error).__name__}")
        self.outcomes[hook.name, "ok"] += 1
        return result

    async def _in_thread(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Run a function in a new thread, which does not keep the process alive."""
        if self._threads >= THREADS_MAX:
            raise RuntimeError(f"{THREADS_MAX} hooks are running")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def ended(result: Any, error: BaseException | None) -> None:
            self._threads -= 1
            if future.done():  # the call has not waited so long
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            result, error = None, None
            try:
                result = function(argument)
            except BaseException as problem:  # noqa: BLE001 (the call gets it)
                error = problem if isinstance(problem, Exception) else RuntimeError(type(problem).__name__)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(ended, result, error)

        self._threads += 1
        threading.Thread(target=work, name="hook", daemon=True).start()
        return await future

    async def _failed(self, hook: Hook, problem: str) -> None:
        """Raise `HookFailed`, unless the policy continues."""
        self.outcomes[hook.name, "failed"] += 1
        if hook.on_error == "refuse":
            raise HookFailed(f"the hook {hook.name!r} {problem}")
        log.warning("the hook %s %s; the request continues without it", hook.name, problem)


def _sees_tenant(hook: Hook, principal: Principal) -> bool:
    tenant = principal.tenant
    return hook.tenants is None or any(name in hook.tenants for name in (tenant.name, *tenant.parents))


def _sees_model(hook: Hook, policy: Policy, asked: str) -> bool:
    """Whether a hook sees requests for a model. Names and aliases of a model count alike."""
    if hook.models is None:
        return True
    model = policy.find_model(asked)
    names = (asked,) if model is None else (asked, model.name, *model.aliases)
    return any(names_include(hook.models, name) for name in names)


def _are_texts(texts: Any, count: int) -> bool:
    return (
        isinstance(texts, Sequence)
        and not isinstance(texts, str)
        and len(texts) == count
        and all(isinstance(text, str) for text in texts)
    )
