"""`warmpath tenants`, `admin-keys` and `audit`, on a SQLite file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gateway.core.api_keys import parse_role_key
from tests.gateway.cli.conftest import Warmpath
from tests.gateway.harness import policy_of


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy_of(tenants=[{"name": "acme"}])))
    return {"WARMPATH_STORAGE": f"sqlite:///{tmp_path}/state.db", "WARMPATH_POLICY": str(tmp_path / "policy.yaml")}


def test_the_life_of_a_tenant(warmpath: Warmpath, env: dict[str, str]) -> None:
    made = warmpath("tenants", "create", "team", "--parent", "acme", "--limits", "{requests: 60/1m}", **env)
    assert (made.exit_code, made.stdout) == (0, "tenant team created\n"), made.output
    assert warmpath("tenants", "create", "user", "--parent", "team", "--model", "m", **env).exit_code == 0
    assert warmpath("keys", "create", "--tenant", "user", "--id", "k", **env).exit_code == 0
    changed = warmpath("tenants", "set", "team", "--limits", "{budget: {amount: 5}}", "--json", **env)
    assert json.loads(changed.stdout)["limits"] == {"budget": {"amount": "5"}}
    listed = json.loads(warmpath("tenants", "list", "--json", **env).stdout)
    assert [(each["name"], each["parent"], each["source"]) for each in listed] == [
        ("acme", None, "policy"), ("team", "acme", "storage"), ("user", "team", "storage")
    ]  # fmt: skip
    assert "user" not in warmpath("tenants", "list", "--parent", "acme", **env).stdout
    refused = warmpath("tenants", "delete", "team", **env)
    assert refused.exit_code == 1 and "is the parent of user" in refused.stderr
    assert warmpath("tenants", "set", "user", "--parent", "", **env).exit_code == 0
    assert warmpath("tenants", "delete", "team", **env).exit_code == 0
    assert "team" not in warmpath("tenants", "list", **env).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "acme"), "there is a tenant 'acme' already"),
        (("create", "x", "--parent", "unknown"), "there is no tenant 'unknown'"),
        (("create", "x", "--limits", "{requests: 5}"), "a rate is a count per duration"),
        (("create", "x", "--limits", "{"), "limits must be YAML"),
        (("delete", "unknown"), "there is no tenant 'unknown'"),
        (("delete", "acme"), "in the policy"),
        (("import", "missing.json"), "No such file"),
    ],
)
def test_what_is_refused(warmpath: Warmpath, env: dict[str, str], arguments: tuple[str, ...], message: str) -> None:
    result = warmpath("tenants", *arguments, **env)
    assert result.exit_code in (1, 2) and message in result.output


def test_an_export_has_tenants_and_keys_for_another_storage(
    warmpath: Warmpath, env: dict[str, str], tmp_path: Path
) -> None:
    warmpath("tenants", "create", "z", "--parent", "acme", **env)
    warmpath("tenants", "create", "a", "--parent", "z", "--limits", "{tokens: 1M/1m}", **env)
    key = warmpath("keys", "create", "--tenant", "a", "--id", "k", **env).stdout.strip()
    exported = warmpath("tenants", "export", **env)
    assert key not in exported.stdout
    other = {**env, "WARMPATH_STORAGE": f"sqlite:///{tmp_path}/other.db"}
    imported = warmpath("tenants", "import", "-", stdin=exported.stdout, **other)
    assert imported.stdout == "2 tenants and 1 keys imported\n", imported.output
    assert warmpath("tenants", "export", **other).stdout == exported.stdout
    again = json.loads(warmpath("tenants", "import", "-", "--json", stdin=exported.stdout, **other).stdout)
    assert again == {"tenants": 2, "keys": 0, "skipped": []}
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy_of(tenants=[{"name": "acme"}, {"name": "z"}])))
    assert "skipped: the tenant 'z' is in the policy" in warmpath(
        "tenants", "import", "-", stdin=exported.stdout, **other
    ).stdout  # fmt: skip


def test_admin_keys(warmpath: Warmpath, env: dict[str, str]) -> None:
    options = ("--role", "admin", "--organisation", "acme", "--expires", "30d")
    key = warmpath("admin-keys", "create", "ops", *options, **env).stdout.strip()
    key_id = parse_role_key(key)
    assert key_id is not None
    (listed,) = json.loads(warmpath("admin-keys", "list", "--json", **env).stdout)
    assert (listed["id"], listed["role"], listed["organisation"], listed["state"]) == (
        key_id,
        "admin",
        "acme",
        "active",
    )
    assert warmpath("admin-keys", "revoke", key_id, **env).exit_code == 0
    assert json.loads(warmpath("admin-keys", "list", "--json", **env).stdout) == []
    assert warmpath("admin-keys", "create", "x", "--role", "root", **env).exit_code == 2


def test_every_change_by_a_command_is_in_the_audit_log(warmpath: Warmpath, env: dict[str, str], tmp_path: Path) -> None:
    warmpath("tenants", "create", "team", "--parent", "acme", **env)
    warmpath("tenants", "create", "team", **env)  # refused
    warmpath("keys", "create", "--tenant", "team", "--id", "k", **env)
    warmpath("keys", "revoke", "k", **env)
    warmpath("admin-keys", "create", "ops", "--role", "viewer", **env)
    warmpath("tenants", "list", **env)  # no change
    acts = json.loads(warmpath("audit", "list", "--json", **env).stdout)
    assert [(each["act"], each["target"], each["status"]) for each in acts] == [
        ("warmpath tenants create", "team", 200),
        ("warmpath tenants create", "team", 409),
        ("warmpath keys create", "team", 200),
        ("warmpath keys revoke", "k", 200),
        ("warmpath admin-keys create", "ops", 200),
    ]
    assert acts[0]["details"] == {"parent": "acme"}
    for options, shown in ((("--since", "1h"), 5), (("--since", "tomorrow"), 0), (("--until", "yesterday"), 0)):
        assert len(json.loads(warmpath("audit", "list", "--json", *options, **env).stdout)) == shown
    assert warmpath("audit", "list", "--since", "sometime", **env).exit_code == 2
    verified = warmpath("audit", "verify", **env)
    assert verified.exit_code == 0 and verified.stdout.startswith("10 rows checked\ncli ")
    (segment,) = (tmp_path / ".warmpath" / "audit" / "cli").glob("*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b'"target":"team"', b'"target":"mate"', 1))
    changed = warmpath("audit", "verify", **env)
    assert changed.exit_code == 1 and "the row was changed" in changed.stderr
