"""A gateway of today on the files that the release before has left: nothing is lost, and nothing has to be converted.

`make_files.py` has made the files, with the release itself.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.e2e.processes import PATIENCE_SECONDS, Gateway, gateway, until, warmpath
from tests.redis_server import RedisServer, own_redis_server
from tests.upgrade.make_files import HANGS, chat, deployment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

__all__ = ["own_redis_server"]

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if (path / "policies").is_dir())
POLICIES = [policy for release in RELEASES for policy in sorted((release / "policies").rglob("*.yaml"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(Path(__file__).parent))


@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
def test_a_policy_of_the_release_before_is_valid(policy: Path, tmp_path: Path) -> None:
    checked = warmpath("check", str(policy), cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture(params=[release / storage for release in RELEASES for storage in ("sqlite", "redis")], ids=name_of)
def upgraded(
    request: pytest.FixtureRequest, tmp_path: Path, own_redis_server: RedisServer
) -> Iterator[tuple[Gateway, dict[str, Any]]]:
    """A gateway of today on the state of a release, and what it must still know."""
    folder = tmp_path / "upgraded"
    shutil.copytree(request.param, folder)
    is_redis = (folder / "redis.json").exists()
    if is_redis:
        restore(own_redis_server, json.loads((folder / "redis.json").read_text()))
    url = own_redis_server.url if is_redis else f"sqlite:///{folder / 'warmpath.db'}"
    policy = yaml.safe_load((folder / "policy.yaml").read_text())
    with deployment() as base_url:
        policy["deployments"][0]["base_url"] = base_url
        with gateway(folder, policy, storage=url) as front:
            yield front, json.loads((folder / "known.json").read_text())


def restore(server: RedisServer, rows: list[tuple[str, int, str]]) -> None:
    with server.client() as client:
        for name, ttl_ms, dump in rows:
            client.restore(name, max(0, ttl_ms), base64.b64decode(dump))


def test_what_a_release_has_stored_is_there(upgraded: tuple[Gateway, dict[str, Any]]) -> None:
    front, known = upgraded
    headers = {"authorization": f"Bearer {known['key']}"}
    with httpx2.Client(base_url=f"{front.url}/v1", headers=headers, timeout=PATIENCE_SECONDS) as client:
        assert client.post("/chat/completions", json=chat("hello")).status_code == 200, "its key is valid"
        stored = client.get(f"/responses/{known['response']}").raise_for_status().json()
        assert stored["output"][0]["content"][0]["text"] == "yes"
        body = {"model": "m", "input": "and then?", "previous_response_id": known["response"]}
        assert client.post("/responses", json=body).status_code == 200, "its responses can be continued"
        assert client.get(f"/batches/{known['batch']}").raise_for_status().json()["status"] == "completed"
        answers = client.get(f"/files/{known['output_file']}/content").raise_for_status().text
        assert json.loads(answers)["response"]["status_code"] == 200


def test_its_ledger_goes_on(upgraded: tuple[Gateway, dict[str, Any]]) -> None:
    """The call that was in flight when the old gateway was killed gets its receipt from the new one."""
    front, known = upgraded
    (before,) = known["usage"]
    lost = until(lambda: front.receipts(outcome="gateway_lost"))
    assert len(lost) == 1 and HANGS.encode() not in front.log.read_bytes()
    assert len(front.receipts(outcome="complete")) == before["requests"]
    settings = {"data_dir": str(front.ledger.parent)}
    verified = warmpath("usage", "verify", "--json", cwd=front.log.parent, **settings)
    assert verified.returncode == 0, verified.stderr
    (now,) = json.loads(warmpath("usage", "--json", cwd=front.log.parent, **settings).stdout)
    assert now["requests"] == before["requests"] + 1
    assert now["output"] >= before["output"] and now["input_uncached"] >= before["input_uncached"]
