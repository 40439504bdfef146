import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.policy import Finding, Policy, located_yaml
from gateway.policy import file as policy_file
from gateway.policy.file import PolicyError, load_policy, parse_policy

MINIMAL = """\
deployments:
  - {name: a, base_url: "http://a/v1", model: m}
models:
  - {name: m, deployments: [a]}
tenants:
  - name: t
"""


def problems(text: str | bytes) -> list[str]:
    content = text.encode() if isinstance(text, str) else text
    with pytest.raises(PolicyError) as caught:
        parse_policy(content, file="p.yaml")
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return [str(problem) for problem in caught.value.problems]


def test_all_problems_are_reported_at_once_with_line_and_column() -> None:
    assert problems("""\
deployments:
  - name: a
    base_ur: http://a/v1
    model: 5
    max_concurrency: many
  - {name: é, base_url: localhost, model: m, api_key: sk-secret}
models:
  - name: m
    deployments: []
rules:
classes:
  fast: 5
  realtime: {ttfd: 5s, total: 0}
tenants:
  - name: t
    limits: {requests: 600, budget: {amount: 1, per: year}}
cache: everything
""") == [
        "p.yaml:2:5: deployments.0.base_url: is required: Base URL of its API, including /v1. "
        "Default of a template: http://{address}/v1.",
        "p.yaml:3:5: deployments.0.base_ur: unknown key 'base_ur'; known: added_prompt_tokens, api_key, base_url, "
        "cache_tokens, continuous_usage, default_max_tokens, defaults, headers, key_header, kv_events, "
        "kv_events_replay, kv_transfer_tokens_per_second, leave_out, max_concurrency, media, media_urls, metrics, "
        "model, name, native, on_disconnect, overrides, plan, prefill_tokens_per_second, price, priorities, "
        "provider, proxy, query, region, role, slots, source, strict_done, system_prompt, tls; did you mean "
        "'base_url'?",
        "p.yaml:4:5: deployments.0.model: must be text: put quotes around it",
        "p.yaml:5:5: deployments.0.max_concurrency: a count is a whole number with an optional k, M or G, "
        "as in 600, 64k or 1M",
        "p.yaml:6:15: deployments.1.base_url: does not match ^https?:// (Base URL of its API, including /v1. "
        "Default of a template: http://{address}/v1.)",
        "p.yaml:6:46: deployments.1.api_key: must be a mapping, with the keys env, file, command, expires",
        "p.yaml:9:5: models.0.deployments: must not be empty",
        "p.yaml:10:1: rules: is empty: set a value or remove the key",
        "p.yaml:12:3: classes.fast: must be a mapping, with the keys ttft, inter_token, total, max_queue, max_wait, "
        "priority, min_share, hold, hold_max, hedge, floor, continue_cut_streams, service_tiers, retries",
        "p.yaml:13:14: classes.realtime.ttfd: unknown key 'ttfd'; known: continue_cut_streams, floor, hedge, hold, "
        "hold_max, inter_token, max_queue, max_wait, min_share, priority, retries, service_tiers, total, ttft; "
        "did you mean 'ttft'?",
        "p.yaml:13:24: classes.realtime.total: should be greater than 0",
        "p.yaml:16:14: tenants.0.limits.requests: a rate is a count per duration, as in 600/1m or 1M/1m",
        "p.yaml:16:49: tenants.0.limits.budget.per: should be 'hour', 'day', 'week', 'month' or 'total'",
        "p.yaml:17:1: cache: must be a mapping, with the keys ttl, scope, when, max_answer_bytes",
    ]  # fmt: skip


def test_unknown_names_are_reported_where_they_stand() -> None:
    assert problems(MINIMAL + "default_class: fast\nrules:\n  - match: {tenant: u}\n    class: btach\n") == [
        "p.yaml:7:1: default_class: there is no class 'fast'; known: batch, realtime",
        "p.yaml:9:13: rules.0.match.tenant: there is no tenant 'u'; known: t",
        "p.yaml:10:5: rules.0.class: there is no class 'btach'; known: batch, realtime; did you mean 'batch'?",
    ]


def test_a_duplicate_key_is_reported_together_with_other_problems() -> None:
    assert problems(MINIMAL + "cache: {ttl: 1s}\ncache: {ttl: 2s}\ntracing: {sampel: 1}\n") == [
        "p.yaml:8:1: cache: duplicate key; first used in line 7",
        "p.yaml:9:11: tracing.sampel: unknown key 'sampel'; known: sample; did you mean 'sample'?",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1:1: must be a mapping with at least the keys deployments, models and tenants"),
        ("- 1", "1:1: must be a mapping with at least the keys deployments, models and tenants"),
        ("é: [1,\nb: 2", "3:1: while parsing a flow sequence, did not find expected ',' or ']'"),
        ("a: 1\n\tb: 2", "2:1: while scanning a plain scalar, found a tab character that violates indentation"),
        ("a: *x", "1:4: found undefined alias"),
        ("é: 1\nb: \x01", "2:4: control characters are not allowed"),
        ("a: 1\n---\nb: 2", "2:1: expected a single document in the stream, but found another document"),
        (b"a: 1\nb: \xff", "2:4: is not UTF-8 text"),
        ("a: 1\nb: &b [*b]", "2:4: too large or too deeply nested with its aliases expanded"),
        ("[" * 100_000, "1:41: nested more than 40 levels deep"),
    ],
)
def test_invalid_yaml_is_reported_at_the_position_of_the_error(text: str | bytes, problem: str) -> None:
    assert problems(text) == [f"p.yaml:{problem}"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http:///v1", "must have a host and a valid port, as in http://10.0.0.5:8000/v1"),
        ("http://a:99999/v1", "must have a host and a valid port, as in http://10.0.0.5:8000/v1"),
        ("http://a:x/v1", "must have a host and a valid port, as in http://10.0.0.5:8000/v1"),
        (
            "http://a/v1/chat/completions/",
            "must not include the endpoint's path: remove /chat/completions",
        ),
    ],
)
def test_an_unusable_base_url_is_reported(url: str, problem: str) -> None:
    assert problems(MINIMAL.replace("http://a/v1", url)) == [f"p.yaml:2:15: deployments.0.base_url: {problem}"]


def test_numbers_too_large_for_the_storage_are_reported() -> None:
    limits = f"{{requests: {10**16}/1m, concurrency: 9999999G, budget: {{amount: {10**10}}}}}"
    text = f"{MINIMAL}    limits: {limits}\n"
    assert [problem.partition(": ")[2] for problem in problems(text)] == [
        "tenants.0.limits.requests.amount: should be less than or equal to 1000000000000000",
        "tenants.0.limits.concurrency: should be less than or equal to 1000000000000000",
        "tenants.0.limits.budget.amount: should be less than or equal to 4000000000",
    ]


def test_a_choice_of_types_is_reported_in_one_message() -> None:
    hedge = "classes: {realtime: {hedge: {after: p96}}}\n"
    assert problems(MINIMAL + hedge) == [
        "p.yaml:7:30: classes.realtime.hedge.after: must be p50, p90, p95, p99, or a duration, as in 500ms"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("metadata: !secret x\n", "7:11: metadata: unsupported tag !secret"),
        ("cache: !!int x\n", "7:8: cache: is not a valid int"),
        ("3: {}\n", "7:1: a key must be text: put quotes around it"),
        ("? [a]\n: b\n", "7:3: a key must be text: put quotes around it"),
        ("<<: 3\n", "7:5: <<: must be a mapping or a list of mappings"),
    ],
)
def test_yaml_features_that_no_policy_needs_are_rejected(text: str, problem: str) -> None:
    assert f"p.yaml:{problem}" in problems(MINIMAL + text)


def test_the_expansion_of_aliases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(located_yaml, "MAX_NODES", 1000)
    lines = ["a0: &a0 [x, x, x, x]"] + [
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 9)
    ]
    (problem,) = problems("\n".join(lines))
    assert "with its aliases expanded" in problem


def test_merge_keys_add_only_missing_keys() -> None:
    policy = parse_policy(
        b"""\
deployments:
  - &a {name: a, base_url: "http://a/v1", model: m, max_concurrency: 7}
  - {<<: *a, name: b}
  - {name: c, <<: [{model: n}, *a]}
models: [{name: m, deployments: [a, b, c]}]
tenants: [{name: t}]
""",
        file="p.yaml",
    )
    assert [(d.name, d.model, d.max_concurrency) for d in policy.deployments] == [
        ("a", "m", 7),
        ("b", "m", 7),
        ("c", "n", 7),
    ]


def test_a_version_may_look_like_a_date() -> None:
    text = MINIMAL.replace("model: m}", "model: m, price: {input: 1, version: 2026-11-20}}")
    (price,) = parse_policy(text.encode(), file="p.yaml").deployments[0].price
    assert price.version == "2026-11-20"


def test_off_is_a_word_for_fields_that_expect_a_word() -> None:
    text = MINIMAL.replace("model: m}", "model: m, metrics: off, priorities: yes}")
    policy = parse_policy(f"{text}cache: {{scope: off}}\ncanonicalise: {{level: off}}\n".encode(), file="p.yaml")
    assert (policy.cache.scope, policy.canonicalise.level) == ("off", "off")
    assert (policy.deployments[0].metrics, policy.deployments[0].priorities) == (False, True)


def test_messages_contain_no_values_because_some_are_secrets() -> None:
    text = MINIMAL + "    keys: [{id: k, hash: wp-k-topsecret}]\n    limits: topsecret\n"
    assert "topsecret" not in "\n".join(problems(text))


def test_findings_of_further_checks_have_positions_too(tmp_path: Path) -> None:
    def no_deployment_a(policy: Policy) -> Iterator[Finding]:
        yield ("deployments", 0, "name"), "not this one"
        yield ("tenants", 0, "limits", "tokens"), "none are set"  # not in the file: reported at the enclosing key

    path = tmp_path / "p.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(PolicyError) as caught:
        load_policy(path, checks=[no_deployment_a])
    assert [(p.line, p.column, p.field, p.message) for p in caught.value.problems] == [
        (2, 6, "deployments.0.name", "not this one"),
        (6, 5, "tenants.0.limits.tokens", "none are set"),
    ]
    assert caught.value.problems[0].file == str(path)


def test_an_unreadable_file_is_reported_as_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"nope\.yaml:1:1: cannot be read: No such file"):
        load_policy(tmp_path / "nope.yaml")
    monkeypatch.setattr(policy_file, "MAX_POLICY_BYTES", 10)
    (tmp_path / "long.yaml").write_text(MINIMAL)
    with pytest.raises(PolicyError, match="is longer than 10 bytes"):
        load_policy(tmp_path / "long.yaml")


def test_the_json_schema_of_a_policy() -> None:
    schema = json.loads(policy_file.policy_schema())
    assert schema["required"] == ["deployments", "models", "tenants"]
    assert schema["additionalProperties"] is False


def test_parsing_a_long_policy_is_not_interrupted_by_garbage_collections() -> None:
    """They would take more time than parsing, because it makes many objects and no garbage."""
    collections: list[str] = []

    def note(phase: str, _: object) -> None:
        collections.append(phase)

    long_policy = MINIMAL + "".join(f"  - name: t{number}\n" for number in range(3000))
    gc.callbacks.append(note)
    try:
        policy_file._parse(long_policy.encode(), "p.yaml", ())
        during_parsing = len(collections)
    finally:
        gc.callbacks.remove(note)
    assert during_parsing <= 2, "at most one, when they are enabled again"
    problems("tenants: 1")
    assert gc.isenabled()
