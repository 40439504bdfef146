import asyncio
import json
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway.core import api_keys as keys
from gateway.policy import Key
from gateway.storage import open_storage
from gateway.storage.base import KeyRecord
from tests.gateway.cli.conftest import Warmpath

POLICIES = Path(__file__).parents[3] / "policies"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/keys.db"


def stored(url: str, key_id: str) -> KeyRecord | None:
    async def get() -> KeyRecord | None:
        storage = open_storage(url)
        await storage.open()
        try:
            return await storage.get_key(key_id)
        finally:
            await storage.close()

    return asyncio.run(get())


def test_a_key_is_printed_once_and_only_its_hash_is_stored(warmpath: Warmpath, url: str, tmp_path: Path) -> None:
    result = warmpath("keys", "create", "--tenant", "dev", "--id", "ci", "--storage", url, WARMPATH_KEY_PEPPER="p")
    assert result.exit_code == 0, result.output
    key = result.stdout.strip()
    record = stored(url, "ci")
    assert record is not None
    assert keys.verify(key, record.hash, "p")
    assert (record.tenant, record.expires, record.models, record.revoked) == ("dev", None, None, False)
    parsed = keys.parse_key(key)
    assert parsed is not None
    assert all(parsed[1].encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_a_key_can_expire_and_be_limited_to_models(warmpath: Warmpath, url: str) -> None:
    options = ("--expires", "30d", "--model", "a", "--model", "b", "--force", "--json")
    result = warmpath("keys", "create", "--tenant", "dev", *options, WARMPATH_STORAGE=url)
    answer = json.loads(result.stdout)
    record = stored(url, answer["id"])
    assert record is not None
    assert record.models == ("a", "b")
    assert record.expires is not None
    life = datetime.fromisoformat(record.expires) - datetime.fromisoformat(record.created)
    assert life == timedelta(days=30)
    assert keys.verify(answer["key"], record.hash, "")


def test_a_tenant_that_the_policy_lacks_needs_force(warmpath: Warmpath, url: str) -> None:
    refused = warmpath("keys", "create", "--tenant", "dve", "--storage", url)
    assert refused.exit_code == 2
    assert "did you mean 'dev'?" in refused.stderr and "--force" in refused.stderr
    assert warmpath("keys", "create", "--tenant", "dve", "--storage", url, "--force").exit_code == 0


def test_list_and_revoke(warmpath: Warmpath, url: str) -> None:
    for key_id, life in (("a", "1ms"), ("b", "1h"), ("c", "1h")):
        warmpath("keys", "create", "--tenant", "dev", "--id", key_id, "--expires", life, "--storage", url)
    result = warmpath("keys", "revoke", "b", "--storage", url)
    assert result.stdout == "key b of dev revoked\n"
    answer = json.loads(warmpath("keys", "list", "--json", "--storage", url).stdout)
    assert [(key["id"], key["state"]) for key in answer] == [("a", "expired"), ("b", "revoked"), ("c", "active")]
    assert "hash" not in answer[0]
    table = warmpath("keys", "list", "--storage", url).stdout.splitlines()
    assert table[0].split() == ["ID", "TENANT", "STATE", "CREATED", "EXPIRES", "MODELS"]
    assert table[2].split()[:3] == ["b", "dev", "revoked"]


def test_an_id_is_never_reused(warmpath: Warmpath, url: str) -> None:
    create = ("keys", "create", "--tenant", "dev", "--id", "a", "--storage", url)
    warmpath(*create)
    warmpath("keys", "revoke", "a", "--storage", url)
    result = warmpath(*create)
    assert result.exit_code == 1
    assert "the key 'a' exists already" in result.stderr
    record = stored(url, "a")
    assert record is not None
    assert record.revoked


def test_revoking_an_unknown_key_is_a_problem(warmpath: Warmpath, url: str) -> None:
    warmpath("keys", "create", "--tenant", "dev", "--id", "nightly", "--storage", url)
    result = warmpath("keys", "revoke", "nigthly", "--storage", url)
    assert result.exit_code == 1
    assert "there is no key 'nigthly' in the storage; known: nightly; did you mean 'nightly'?" in result.stderr


@pytest.mark.parametrize("verb", [("create", "--tenant", "dev"), ("list",), ("revoke", "x")])
def test_memory_storage_is_rejected(warmpath: Warmpath, verb: tuple[str, ...]) -> None:
    result = warmpath("keys", *verb)
    assert result.exit_code == 2
    assert "memory:// would lose the keys" in result.stderr
    assert result.stdout == ""


def test_keys_cannot_be_made_with_another_pepper_until_it_is_changed(warmpath: Warmpath, url: str) -> None:
    def run(*arguments: str, pepper: str) -> tuple[int, str]:
        result = warmpath("keys", *arguments, WARMPATH_STORAGE=url, WARMPATH_KEY_PEPPER=pepper)
        return result.exit_code, " ".join(result.output.split())

    create = ("create", "--tenant", "dev", "--id")
    assert run(*create, "ci", pepper="p")[0] == 0
    for arguments in ((*create, "new"), ("rotate", "ci")):
        code, said = run(*arguments, pepper="")
        assert code == 1
        assert "WARMPATH_KEY_PEPPER differs from the one" in said and "warmpath keys change-pepper" in said
    assert stored(url, "new") is None
    assert run("change-pepper", pepper="p") == (0, "The storage has this WARMPATH_KEY_PEPPER already.")
    code, said = run("change-pepper", pepper="q")
    assert code == 0 and said.endswith("made with the old pepper: ci")
    assert run("rotate", "ci", pepper="q")[0] == 0
    assert run(*create, "new", pepper="p")[0] == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--id", "A-b"), "a key id has 1 to 63 characters of a-z"),
        (("--expires", "soon"), "'soon' is not a time: use a duration from now as in 2h"),
        (("--expires", "yesterday"), "yesterday is not in the future"),
        (("--expires", "99999999999d"), "at most a hundred years"),
        (("--storage", "dbase://x"), "unknown scheme in 'dbase://...'"),
    ],
)
def test_wrong_usage_of_create(warmpath: Warmpath, url: str, options: tuple[str, ...], complaint: str) -> None:
    result = warmpath("keys", "create", "--tenant", "dev", *options, WARMPATH_STORAGE=url)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split())


def test_tenant_and_models_must_be_in_the_named_policy(warmpath: Warmpath, url: str) -> None:
    def create(*options: str) -> str:
        result = warmpath("keys", "create", *options, "--storage", url, WARMPATH_POLICY=str(POLICIES / "default.yaml"))
        return "" if result.exit_code == 0 else result.stderr

    assert "there is no tenant 'dve'" in create("--tenant", "dve")
    assert "there is no model 'gpt'" in create("--tenant", "dev", "--model", "gpt")
    assert create("--tenant", "dev", "--model", "demo") == ""


def test_an_unreachable_storage_is_reported(warmpath: Warmpath) -> None:
    result = warmpath("keys", "list", "--storage", "redis://127.0.0.1:1/0")
    assert result.exit_code == 1
    assert result.stderr != ""
    assert "Traceback" not in result.output


def test_hash_prints_the_line_for_a_policy_file(warmpath: Warmpath) -> None:
    key = keys.new_key("ci")
    result = warmpath("keys", "hash", stdin=f"{key}\n", WARMPATH_KEY_PEPPER="p")
    (line,) = yaml.safe_load(result.stdout)
    in_file = Key.model_validate(line)
    assert in_file.id == "ci"
    assert keys.verify(key, in_file.hash, "p")
    assert json.loads(warmpath("keys", "hash", "--json", stdin=key, WARMPATH_KEY_PEPPER="p").stdout) == line


def test_hash_can_create_the_key(warmpath: Warmpath) -> None:
    key, line = warmpath("keys", "hash", "--new", "ci").stdout.splitlines()
    assert keys.verify(key, yaml.safe_load(line)[0]["hash"], "")
    answer = json.loads(warmpath("keys", "hash", "--new", "ci", "--json").stdout)
    assert keys.verify(answer["key"], answer["hash"], "")


def test_hash_rejects_invalid_keys_and_warns_of_weak_ones(warmpath: Warmpath) -> None:
    result = warmpath("keys", "hash", stdin="sk-topsecret\n")
    assert result.exit_code == 2
    assert "topsecret" not in result.output
    assert "so short that it can be guessed" in warmpath("keys", "hash", stdin="wp-dev-x\n").stderr


def test_rotate_makes_a_new_secret_and_keeps_the_old_one_valid_for_a_while(warmpath: Warmpath, url: str) -> None:
    first = warmpath("keys", "create", "--tenant", "dev", "--id", "ci", "--storage", url).stdout.strip()
    answer = json.loads(warmpath("keys", "rotate", "ci", "--overlap", "1h", "--json", "--storage", url).stdout)
    record = stored(url, "ci")
    assert record is not None
    assert record.old_hash is not None
    assert keys.verify(answer["key"], record.hash, "")
    assert keys.verify(first, record.old_hash, "")
    assert answer["old_secret_expires"] == record.old_expires
    warmpath("keys", "revoke", "ci", "--storage", url)
    assert "is revoked; create a new one" in warmpath("keys", "rotate", "ci", "--storage", url).stderr
    too_long = warmpath("keys", "rotate", "ci", "--overlap", "31d", "--storage", url)
    assert too_long.exit_code == 2
    assert "at most 30 days" in too_long.stderr


def test_keys_whose_rotation_is_due(warmpath: Warmpath, url: str) -> None:
    for key_id in ("old", "rotated", "revoked", "new"):
        warmpath("keys", "create", "--tenant", "dev", "--id", key_id, "--storage", url)

    async def age() -> None:
        storage = open_storage(url)
        await storage.open()
        try:
            for key_id in ("old", "rotated", "revoked"):
                record = await storage.get_key(key_id)
                assert record is not None
                await storage.put_key(msgspec.structs.replace(record, created="2026-01-01T00:00:00Z"))
        finally:
            await storage.close()

    asyncio.run(age())
    warmpath("keys", "rotate", "rotated", "--storage", url)
    warmpath("keys", "revoke", "revoked", "--storage", url)
    due = warmpath("keys", "list", "--rotation-due", "1h", "--json", "--storage", url)
    assert [(key["id"], key["secret_created"]) for key in json.loads(due.stdout)] == [("old", "2026-01-01T00:00:00Z")]
    assert due.exit_code == 1
    assert warmpath("keys", "list", "--rotation-due", "36500d", "--storage", url).exit_code == 0
    assert warmpath("keys", "list", "--rotation-due", "soon", "--storage", url).exit_code == 2


def test_a_key_can_have_its_own_classes_and_limits(warmpath: Warmpath, url: str) -> None:
    limits = "{requests: 60/1m, budget: {amount: 5.25, per: day}}"
    options = ("--id", "ci", "--class", "batch", "--limits", limits, "--storage", url)
    assert warmpath("keys", "create", "--tenant", "dev", *options).exit_code == 0
    record = stored(url, "ci")
    assert record is not None
    assert record.classes == ("batch",)
    assert record.limits == {
        "requests": {"amount": 60, "period": 60.0},
        "budget": {"amount": "5.25", "per": "day", "cut_streams": False, "soft": False},
    }
    wrong = warmpath("keys", "create", "--tenant", "dev", "--limits", "{requests: many}", "--storage", url)
    assert wrong.exit_code == 2
    assert "limits.requests: a rate is a count per duration" in " ".join(wrong.stderr.split())
