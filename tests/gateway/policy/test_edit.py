"""Exceptions are added to policy files in any layout, and every other byte of the file stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.policy import located_yaml
from gateway.policy.edit import PolicyEdit, PolicyEditError, edit_policy, exception_line
from gateway.policy.file import PolicyError, load_policy
from tests.docs.markdown import ROOT

HEAD = """\
# A policy.   With a comment
deployments:
- {name: a, base_url: "http://a.invalid/v1", model: m}   # aligned
models: [{name: m, deployments: [a]}, {name: "m 2", deployments: [a]}]
tenants:
    -   name: t
    -   name: ünï
"""
MOVE = {"tenant": "t", "model": "m", "level": "full", "opt_in": ["volatile_to_user"]}
LINE = "{tenant: t, model: m, level: full, opt_in: [volatile_to_user]}"


def edit(folder: Path, text: str, *exceptions: dict[str, Any]) -> PolicyEdit:
    (folder / "policy.yaml").write_bytes(text.encode())
    return edit_policy(folder / "policy.yaml", exceptions or [MOVE])


def added(edit: PolicyEdit) -> list[str]:
    """The added lines. All others must be as they were."""
    before, after = (content.decode().splitlines() for content in (edit.old, edit.new))
    new = [line for line in after if line not in before]
    assert [line for line in after if line in before] == before
    return new


LAYOUTS: dict[str, tuple[str, list[str]]] = {
    "no section": (HEAD, ["canonicalise:", "  exceptions:", f"    - {LINE}"]),
    "no end of line": (HEAD + "default_class: batch", ["canonicalise:", "  exceptions:", f"    - {LINE}"]),
    "a comment at the end": (HEAD + "\n# The end.\n", ["canonicalise:", "  exceptions:", f"    - {LINE}"]),
    "a section": (
        f"{HEAD}canonicalise:   # why\n   # more\n   level: full # yes\n   opt_in:\n   - tool_order # o\n\n# End.\n",
        ["   exceptions:", f"     - {LINE}"],
    ),
    "a list": (
        f"{HEAD}canonicalise:\n  exceptions:   # one\n    # two\n    - level: safe\n      tenant: t\n  level: full\n",
        [f"    - {LINE}"],
    ),
    "a list without indentation": (
        HEAD + "canonicalise:\n  exceptions:\n  - {tenant: t}\n  - {model: m}\n", [f"  - {LINE}"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_lines_are_added_and_nothing_else_changes(tmp_path: Path, name: str) -> None:
    text, lines = LAYOUTS[name]
    change = edit(tmp_path, text)
    assert added(change) == lines
    form = change.policy.canonicalise.form_for("t", "m")
    assert (form.level, form.opt_in) == ("full", ("volatile_to_user",))
    before = located_yaml.load(text).data.get("canonicalise", {}).get("exceptions", [])
    assert located_yaml.load(change.new.decode()).data["canonicalise"]["exceptions"] == [MOVE, *before]
    assert edit(tmp_path, text.replace("\n", "\r\n")).new == change.new.replace(b"\n", b"\r\n")
    with_bom = "\ufeff" + text
    assert edit(tmp_path, with_bom).new == b"\xef\xbb\xbf" + change.new


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("canonicalise: {level: safe}  # s", f"canonicalise: {{level: safe, exceptions: [{LINE}]}}  # s"),
        ("canonicalise: {}", f"canonicalise: {{exceptions: [{LINE}]}}"),
        ("canonicalise: {level: safe, }", f"canonicalise: {{level: safe, exceptions: [{LINE}], }}"),
        ("canonicalise: {exceptions: []}", f"canonicalise: {{exceptions: [{LINE}]}}"),
        ("canonicalise: {exceptions: [{tenant: t}]}", f"canonicalise: {{exceptions: [{LINE}, {{tenant: t}}]}}"),
        ("canonicalise:\n  exceptions: [] # e", f"canonicalise:\n  exceptions: [{LINE}] # e"),
        (
            "canonicalise: {exceptions: [{level: safe, tenant: [t], model: m}, {tenant: t}]}",
            "canonicalise: {exceptions: [{level: full, tenant: [t], model: m, opt_in: [volatile_to_user]}, "
            "{tenant: t}]}",
        ),
        (
            "canonicalise:\n  exceptions:\n    - tenant: t # his\n      model: [m]\n      level: full # why\n"
            "      opt_in:  # these\n        - tool_order\n      # end\n  level: safe",
            "canonicalise:\n  exceptions:\n    - tenant: t # his\n      model: [m]\n      level: full # why\n"
            "      opt_in:  # these\n        [volatile_to_user]\n      # end\n  level: safe",
        ),
        (
            "canonicalise:\n  exceptions:\n    - tenant: t # his\n      model: m\n  level: safe",
            "canonicalise:\n  exceptions:\n    - tenant: t # his\n      model: m\n      level: full\n"
            "      opt_in: [volatile_to_user]\n  level: safe",
        ),
        (
            "canonicalise: {exceptions: [{tenant: t, model: m, level: full, template_date: d, "
            "opt_in: [template_date]}]}",
            "canonicalise: {exceptions: [{tenant: t, model: m, level: full, template_date: null, "
            "opt_in: [volatile_to_user]}]}",
        ),
    ],
)
def test_flow_style_and_exceptions_of_the_same_scope(tmp_path: Path, section: str, expected: str) -> None:
    change = edit(tmp_path, f"{HEAD}{section}\ncache: {{scope: off}}   # off\n")
    assert change.new.decode() == f"{HEAD}{expected}\ncache: {{scope: off}}   # off\n"
    again = edit(tmp_path, change.new.decode())
    assert (again.diff(), again.new) == ("", again.old), "it has the exception already"


def test_a_policy_in_json_stays_json(tmp_path: Path) -> None:
    plain = yaml.safe_load(HEAD)
    for document in (plain, {**plain, "canonicalise": {"exceptions": [{"tenant": "t", "model": "m"}]}}):
        change = edit(tmp_path, json.dumps(document, indent=1))
        assert json.loads(change.new)["canonicalise"]["exceptions"] == [MOVE]


def test_several_exceptions_keep_their_order(tmp_path: Path) -> None:
    other = {
        "tenant": "ünï",
        "model": ["m", "m 2"],
        "level": "full",
        "opt_in": ["template_date"],
        "template_date": "1 Jan",
    }
    assert added(edit(tmp_path, HEAD, MOVE, other)) == [
        "canonicalise:", "  exceptions:", f"    - {LINE}",
        '    - {tenant: "ünï", model: [m, m 2], level: full, opt_in: [template_date], template_date: "1 Jan"}',
    ]  # fmt: skip


def test_the_default_policy_keeps_all_its_comments(tmp_path: Path) -> None:
    """It has an exception for this tenant and model already."""
    text = (ROOT / "policies" / "default.yaml").read_text()
    change = edit(tmp_path, text, {**MOVE, "tenant": "dev", "model": "warmpath-demo"})
    pairs = list(zip(text.splitlines(), change.new.decode().splitlines(), strict=True))
    assert [after for before, after in pairs if before != after] == [
        "      level: full", "      opt_in: [volatile_to_user]"
    ]  # fmt: skip
    assert [before.partition("#")[2] for before, _ in pairs] == [after.partition("#")[2] for _, after in pairs]
    assert change.diff().count("\n-      ") == 2


@pytest.mark.parametrize("name", ["yes", "null", "1e3", "a: b", "#x", "a'b\"c", "{x}", "off", "~", "2024-01-01", "x,y"])
def test_names_are_quoted_where_yaml_needs_it(name: str) -> None:
    assert located_yaml.load(exception_line({"tenant": name, "model": [name]})).data == {
        "tenant": name,
        "model": [name],
    }


def test_what_a_merge_key_brings_is_not_edited(tmp_path: Path) -> None:
    anchored = f"{HEAD}canonicalise: &c {{level: safe}}\n"
    assert edit(tmp_path, anchored).policy.canonicalise.level == "safe"
    merged = f"{HEAD}canonicalise:\n  <<: {{exceptions: [{{tenant: t}}]}}\n  level: safe\n"
    with pytest.raises(PolicyEditError, match=r"cannot be edited; add to its `exceptions`, as the first: \{tenant: t,"):
        edit(tmp_path, merged)


def test_an_invalid_policy_is_not_edited_and_no_edit_makes_one(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="favourite"):
        edit(tmp_path, HEAD + "favourite: batch\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml:9:"):
        edit(tmp_path, HEAD + "canonicalise: {")
    with pytest.raises(PolicyError, match="there is no tenant 'missing'"):
        edit(tmp_path, HEAD, {**MOVE, "tenant": "missing"})
    with pytest.raises(PolicyError, match="cannot be read"):
        edit_policy(tmp_path / "none.yaml", [MOVE])
    refuse = lambda _: [(("tenants",), "no")]  # noqa: E731
    with pytest.raises(PolicyError, match="tenants: no"):
        edit_policy(tmp_path / "policy.yaml", [], checks=[refuse])


def test_the_file_is_replaced_with_its_mode_and_links_stay(tmp_path: Path) -> None:
    change = edit(tmp_path, HEAD)
    (tmp_path / "policy.yaml").chmod(0o640)
    (tmp_path / "link.yaml").symlink_to("policy.yaml")
    edit_policy(tmp_path / "link.yaml", [MOVE]).write()
    assert (tmp_path / "policy.yaml").read_bytes() == change.new
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "policy.yaml").stat().st_mode & 0o7777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.yaml", "policy.yaml"]
    assert load_policy(tmp_path / "policy.yaml").canonicalise.form_for("t", "m").level == "full"


def test_a_file_that_has_changed_meanwhile_stays(tmp_path: Path) -> None:
    change = edit(tmp_path, HEAD)
    (tmp_path / "policy.yaml").write_text(HEAD + "# mine\n")
    with pytest.raises(PolicyEditError, match="has changed since it was read"):
        change.write()
    assert (tmp_path / "policy.yaml").read_text() == HEAD + "# mine\n"


def test_a_file_that_cannot_be_written_is_named_and_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = edit(tmp_path, HEAD)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PolicyEditError, match=r"policy\.yaml cannot be written: No space left on device"):
        change.write()
    assert [path.read_text() for path in tmp_path.iterdir()] == [HEAD]
