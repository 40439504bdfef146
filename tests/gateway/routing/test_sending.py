"""The order in which an attempt is sent and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gateway.core.errors import UpstreamRefused
from gateway.providers.base import Fault, ProviderFailure, UpstreamResponse
from gateway.types import Call
from tests.gateway.routing import rig as rig_module


class Seeing(rig_module.Script):
    """Notes how many calls the estimates have in flight, when the request is sent and later."""

    rig: rig_module.Rig

    async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
        (state,) = self.rig.fleet
        self.seen = [state.in_flight]
        await asyncio.sleep(0)
        self.seen.append(state.in_flight)
        return await super().open(call, headers=headers)


async def test_estimates_are_updated_while_the_deployment_works() -> None:
    script = Seeing(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', b"data: [DONE]\n\n")
    rig = script.rig = rig_module.Rig(rig_module.one_deployment(), a=script)
    await rig.chunks()
    assert script.seen == [0, 1]
    assert rig.idle()


async def test_an_attempt_that_fails_at_once_is_recorded_too() -> None:
    class Failing(rig_module.Script):
        async def open(self, call: Call, *, headers: Mapping[str, str], body: bytes | None = None) -> UpstreamResponse:
            raise ProviderFailure(Fault.REFUSED, "status 400", status=400, body=b"{}")

    rig = rig_module.Rig(rig_module.one_deployment(), a=Failing())
    with pytest.raises(UpstreamRefused):
        await rig.chunks()
    assert rig.outcomes == [("a", "refused")]
    assert rig.idle()
