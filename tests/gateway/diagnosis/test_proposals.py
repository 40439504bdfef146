"""Policy lines are proposed if a replay shows that they save tokens, and the prediction is what then happens."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.diagnosis import DiagnosisReport, policy_line, report
from gateway.diagnosis.outline import PromptPart
from gateway.diagnosis.prompt_chain import MAX_UNITS, UNIT_BYTES, UNIT_TOKENS, chain_of, unit_count, units_of
from gateway.diagnosis.replay import Replay
from gateway.diagnosis.report import CHANGED_SINCE, NOT_RECORDED
from gateway.types import Usage
from tests.gateway.diagnosis.test_breaks import LATER, STABLE, DiagnosisRig, chat, sampled_policy, tool

Body = dict[str, Any]


def traffic(
    turns: int = 4, conversations: int = 6, *, models: tuple[str, ...] = ("m",), **fields: Any
) -> Iterator[Body]:
    """Conversations whose system prompts begin with a clock, in turn."""
    for turn in range(turns):
        for n in range(conversations):
            clock = f"Current time: {turn + 8:02}:{n:02}"
            yield chat(f"{clock}\n{STABLE}", *LATER * turn, user=f"I am {n}.", **fields) | {
                "model": models[n % len(models)]
            }


def send(rig: DiagnosisRig, bodies: Iterator[Body]) -> DiagnosisReport:
    for body in bodies:
        rig.call(body)
    return report(rig.rows, rig.policy)


def applied(found: DiagnosisReport) -> dict[str, Any]:
    """The policy fields of all proposals."""
    lines = [yaml.safe_load(policy_line(proposal)) for proposal in found.proposals]
    return {"canonicalise": {"exceptions": [line["canonicalise"]["exceptions"][0] for line in lines]}}


def test_a_proposal_saves_what_was_predicted(tmp_path: Path) -> None:
    found = send(DiagnosisRig(tmp_path / "before"), traffic())
    (proposal,) = found.proposals
    assert proposal.opt_in == ("volatile_to_user",), "the clock changes in every turn"
    assert proposal.replayed_calls == 24
    assert 0.5 < proposal.saved_share < 0.95
    after = send(DiagnosisRig(tmp_path / "after", **applied(found)), traffic())
    assert after.predicted_share == pytest.approx(found.predicted_share + proposal.saved_share, abs=0.02)
    assert after.proposals == []


def test_text_that_is_constant_within_a_conversation_moves_less_far(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    for turn in range(3):
        for n in range(5):
            rig.call(chat(f"cwd: /home/ada/{n}{n}\n{STABLE}", *LATER * turn, user=f"I am {n}."))
    (proposal,) = report(rig.rows).proposals
    assert proposal.opt_in == ("volatile_to_end",)


def test_savings_are_scaled_from_the_sample_and_priced(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    send(rig, traffic())
    (whole,) = report(rig.rows).proposals
    tenth = [msgspec.structs.replace(row, sample=0.1, cache_tokens=10 * row.cache_tokens) for row in rig.rows]
    (scaled,) = report(tenth).proposals
    assert scaled.saved_tokens == pytest.approx(10 * whole.saved_tokens)
    assert scaled.saved_share == pytest.approx(whole.saved_share)
    per_token = Decimal("0.9") / 1_000_000  # of the prices, per million
    assert whole.saved_cost == {"USD": pytest.approx(Decimal(whole.saved_tokens) * per_token)}


def test_one_cause_is_one_finding_and_one_line_over_all_models(tmp_path: Path) -> None:
    names = ("m", "n")
    models = [{"name": name, "deployments": ["a", "b"]} for name in names]
    found = send(DiagnosisRig(tmp_path, models=models), traffic(models=names))
    causes = [finding for finding in found.findings if finding.place.startswith("system")]
    assert [(finding.kind, finding.models, finding.proposals) for finding in causes] == [("clock", names, (0,))]
    assert [proposal.models for proposal in found.proposals] == [names]
    assert policy_line(found.proposals[0]) == (
        "canonicalise: {exceptions: [{tenant: t, model: [m, n], level: full, opt_in: [volatile_to_user]}]}"
    )


def test_two_causes_of_which_each_hides_the_other_are_fixed_by_one_line(tmp_path: Path) -> None:
    """Without the order of the tools, moving the clock moves nothing, since tools come first."""
    rig, random = DiagnosisRig(tmp_path), Random(1)
    for turn in range(4):
        for n in range(4):
            tools = random.sample([tool(name) for name in "fghi"], 4)
            clock = f"Current time: {turn + 8:02}:{n:02}"
            rig.call(chat(f"{clock}\n{STABLE}", *LATER * turn, user=f"I am {n}.", tools=tools))
    replay = Replay(rig.rows)
    before = sum(replay.cached_tokens())
    alone = {
        name: sum(replay.cached_tokens({("t", "m"): frozenset({name})})) for name in ("volatile_to_user", "tool_order")
    }
    both = sum(replay.cached_tokens({("t", "m"): frozenset(alone)}))
    assert alone["volatile_to_user"] - before < 0.2 * (both - before)
    found = report(rig.rows)
    assert [proposal.opt_in for proposal in found.proposals] == [("volatile_to_user", "tool_order")]
    assert {finding.proposals for finding in found.findings if finding.kind == "tool_order"} == {(0,)}


def test_a_transform_that_adds_nothing_is_left_out(tmp_path: Path) -> None:
    """The tools are few and change order once; the clock changes always, and no line of it can be moved."""
    rig = DiagnosisRig(tmp_path)
    for n in range(8):
        tools = [tool("f"), tool("g")] if n % 2 else [tool("g"), tool("f")]
        rig.call(chat(f"It was {8 + n:02}:00 when we began. {STABLE}", user=f"I am {n}.", tools=tools))
    kinds = {finding.kind: finding for finding in report(rig.rows).findings}
    assert kinds.keys() == {"tool_order", "clock"} or kinds.keys() == {"tool_order"}
    assert [proposal.opt_in for proposal in report(rig.rows).proposals] == [("tool_order",)]


def test_the_order_of_properties_is_ignored_only_by_choice(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    for n in range(4):
        shuffled = tool("f")
        if n % 2:
            schema = shuffled["function"]["parameters"]
            schema["properties"] = dict(reversed(schema["properties"].items()))
        rig.call(chat(user=f"I am {n}.", tools=[shuffled]))
    found = report(rig.rows)
    assert [finding.kind for finding in found.findings] == ["key_order"]
    assert [proposal.opt_in for proposal in found.proposals] == [("property_order",)]


def test_a_proposal_keeps_what_the_policy_has_for_this_tenant(tmp_path: Path) -> None:
    form = {"level": "full", "opt_in": ["template_date", "tool_order"], "template_date": "1 Jan 2020"}
    found = send(DiagnosisRig(tmp_path, canonicalise={"exceptions": [{"tenant": "t", **form}]}), traffic())
    (proposal,) = found.proposals
    assert proposal.exception == {
        "tenant": "t", "model": "m", "level": "full", "opt_in": ["template_date", "tool_order", "volatile_to_user"],
        "template_date": "1 Jan 2020",
    }  # fmt: skip


def test_what_the_policy_has_by_now_is_not_proposed_again(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    before = send(rig, traffic())
    found = report(rig.rows, sampled_policy(**applied(before)))
    assert found.proposals == []
    assert {f.advice for f in found.findings if f.place.startswith("system")} == {CHANGED_SINCE}
    gone = report(rig.rows, sampled_policy(tenants=[{"name": "u"}]))
    assert gone.proposals == [], "the policy has no such tenant any more"


def test_a_small_cache_gains_less(tmp_path: Path) -> None:
    """Conversations evict each other, and only the shared system prompt stays, so the clock need not move so far."""
    rig = DiagnosisRig(tmp_path)
    (large,) = send(rig, traffic()).proposals
    (small,) = report(msgspec.structs.replace(row, cache_tokens=16) for row in rig.rows).proposals
    assert (large.opt_in, small.opt_in) == (("volatile_to_user",), ("volatile_to_end",))
    assert small.saved_tokens < large.saved_tokens


def test_a_sample_gets_its_share_of_the_cache(tmp_path: Path) -> None:
    """The other nine tenths of the conversations need their room, too."""
    rig = DiagnosisRig(tmp_path)
    send(rig, (body for turn in range(3) for n in range(20) for body in [chat(f"{n}{STABLE}", *LATER * turn)]))
    room = sum(len(units_of(row.chain)) for row in rig.rows[-20:]) * UNIT_TOKENS
    whole, tenth = (
        report(msgspec.structs.replace(row, sample=sample, cache_tokens=room) for row in rig.rows)
        for sample in (1.0, 0.1)
    )
    assert whole.predicted_share > 0.5
    assert tenth.predicted_share < 0.1


def test_calls_of_an_earlier_release_are_not_replayed(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    send(rig, traffic())
    added = ("opt_in", "chain", "forms", "cache_tokens", "miss_cost")
    old = [{k: v for k, v in msgspec.to_builtins(row).items() if k not in added} for row in rig.rows]
    (file,) = rig.folder.rglob("current.jsonl")
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in old))
    assert len(rig.rows) == 24
    found = report(rig.rows)
    assert (found.proposals, found.replayed_calls) == ([], 0)
    assert NOT_RECORDED in {finding.advice for finding in found.findings}


def test_the_latest_calls_are_replayed_if_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DiagnosisRig(tmp_path)
    (whole,) = send(rig, traffic(turns=6)).proposals
    monkeypatch.setattr("gateway.diagnosis.replay.MAX_REPLAYED_UNITS", sum(unit_count(r.chain) for r in rig.rows[18:]))
    found = report(rig.rows)
    assert found.replayed_calls == 18
    assert found.proposals[0].saved_tokens == pytest.approx(whole.saved_tokens, rel=0.25), "scaled to all calls"


def test_a_deployment_that_has_the_prefix_is_chosen(tmp_path: Path) -> None:
    """A fleet that routes by prefix would not compute a system prompt once per call."""
    rig = DiagnosisRig(tmp_path)
    for n in range(8):
        rig.call(chat(user=f"I am {n}."), deployment="ab"[n % 2])
    found = report(rig.rows)
    assert found.predicted_share > 0.8
    assert found.reported_share == 0


def test_predicted_and_reported_hits_are_compared(tmp_path: Path) -> None:
    rig = DiagnosisRig(tmp_path)
    for turn in range(6):
        body = chat(STABLE, *LATER * turn)
        tokens = 430 + turn * 105
        cached = 0 if not turn else tokens - 105
        rig.call(body, Usage(input_uncached=tokens - cached, cache_read=cached, exact=True))
    found = report(rig.rows)
    assert found.predicted_share == pytest.approx(found.reported_share, abs=0.05)


words = st.binary(max_size=40_000)


@given(shared=words, one=words, other=words)
@settings(max_examples=60)
def test_chains_agree_as_far_as_texts_do(shared: bytes, one: bytes, other: bytes) -> None:
    texts = [(shared + rest).decode("latin-1").replace("\\x80", "x") for rest in (b"<" + one, b">" + other)]
    chains = [units_of(chain_of([PromptPart("", "", text, "", "", 0, ())], 7)) for text in texts]
    agreed = next((i for i, (a, b) in enumerate(zip(*chains, strict=False)) if a != b), min(map(len, chains)))
    common = next((i for i, (a, b) in enumerate(zip(*(t.encode() for t in texts), strict=False)) if a != b), 0) + 1
    exact = min(common // UNIT_BYTES, *map(len, chains))
    assert exact * 31 // 32 - 1 <= agreed <= exact


def test_a_chain_is_bounded_and_another_salt_gives_another_one() -> None:
    def chain(length: int, seed: int = 1) -> str:
        return chain_of([PromptPart("", "user", "x" * length, "", "", 0, ())], seed)

    assert len(chain(4 * 128_000)) < 1200
    assert len(units_of(chain(10 * MAX_UNITS * UNIT_BYTES))) == MAX_UNITS
    assert not set(units_of(chain(4000))) & set(units_of(chain(4000, seed=2)))
    for length in (0, 10, 4000, 5000, 100_000):
        assert unit_count(chain(length)) == len(units_of(chain(length)))
    assert units_of("no base64!") == []
