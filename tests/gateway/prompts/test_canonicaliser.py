"""How a request body becomes a call: checks, model, class, deadline, salt and fingerprint."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import pytest

from gateway.core.errors import BadRequest, Forbidden, ModelNotFound
from gateway.endpoints import ENDPOINTS
from gateway.policy import Policy
from gateway.policy.traffic import EndpointName
from gateway.prompts.canonicaliser import Canonicaliser, join_fields
from gateway.types import Call, Operation, Principal
from tests.gateway.calls import UNTRACED, a_call, a_policy, chat


def test_unknown_fields_keep_their_bytes() -> None:
    body = b'{"model": "m", "messages": [{"role":"user","content":"hi"}],  "x_new": {"b": 1.50,  "a": [ ]}}'
    call = a_call(body)
    assert bytes(call.fields["x_new"]) == b'{"b": 1.50,  "a": [ ]}'
    assert json.loads(join_fields(call.fields)) == json.loads(body)


@pytest.mark.parametrize(
    ("named", "end_user"),
    [
        ({}, None),
        ({"user": "u" * 512}, "u" * 512),
        ({"safety_identifier": "s"}, "s"),
        ({"safety_identifier": "s", "user": "u"}, "s"),
        ({"safety_identifier": "", "user": "u"}, "u"),
    ],
)
def test_the_end_user_of_a_call(named: dict[str, str], end_user: str | None) -> None:
    """OpenAI replaced `user` by `safety_identifier`."""
    assert a_call(chat(**named)).end_user == end_user


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1, 2]", None),
        (b"null", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (b"{}", "model"),
        (b'{"model": 5, "messages": []}', "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": "hi"}', "messages"),
        (b'{"model": "m", "messages": []}', "messages"),
        (b'{"model": "m", "messages": [{"content": "x"}]}', "messages[0].role"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user"}], "stream": "yes"}', "stream"),
        (b'{"model": "m", "messages": [{"role": "user"}], "max_tokens": -1}', "max_tokens"),
        (b'{"model": "m", "messages": [{"role": "user"}], "n": 0}', "n"),
        (b'{"model": "m", "messages": [{"role": "user"}], "tools": {}}', "tools"),
        (b'{"model": "m", "messages": [], "user": "%b"}' % (b"x" * 513), "user"),
        (b'{"model": "m", "messages": [], "safety_identifier": "%b"}' % (b"x" * 513), "safety_identifier"),
        (b'{"model": "m", "messages": [], "service_tier": "%b"}' % (b"x" * 513), "service_tier"),
    ],
)
def test_a_bad_body_is_refused_with_the_fields_name(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as refusal:
        a_call(body)
    assert refusal.value.status == 400
    assert refusal.value.param == param


def test_a_model_that_a_tenant_may_not_use_does_not_exist_for_it() -> None:
    models = [{"name": "m", "deployments": ["a"]}, {"name": "other", "deployments": ["b"], "aliases": ["mine"]}]
    policy = a_policy(tenants=[{"name": "t", "models": ["mine"]}], models=models)
    assert a_call(chat() | {"model": "other"}, policy).model.name == "other"
    with pytest.raises(ModelNotFound, match="'m' does not exist"):
        a_call(policy=policy)
    with pytest.raises(ModelNotFound):
        a_call({"model": "nonsense", "messages": [{"role": "user", "content": "x"}]})


def test_a_key_without_a_tenants_model_is_forbidden() -> None:
    with pytest.raises(Forbidden, match="key 'k' may not use"):
        a_call(key_models=frozenset({"other"}))


def test_a_caller_context_ends_with_the_principal_and_the_policy() -> None:
    canonicaliser, policy = Canonicaliser(b"secret"), a_policy()
    without = a_policy(models=[{"name": "other", "deployments": ["a", "b"]}])
    free = Principal(policy.tenants_by_name["t"], "k")

    def asked(principal: Principal, policy: Policy) -> Call:
        endpoint = next(endpoint for endpoint in ENDPOINTS if endpoint.operation is Operation.CHAT)
        return canonicaliser.canonicalise(
            endpoint, json.dumps(chat()).encode(), {}, call_id="1", principal=principal, policy=policy, now=0.0,
            trace=UNTRACED,
        )  # fmt: skip

    salt = asked(free, policy).cache_salt
    assert asked(free, policy).cache_salt == salt
    with pytest.raises(Forbidden):
        asked(Principal(free.tenant, "k", frozenset({"other"})), policy)
    moved = Principal(policy.tenants_by_name["u"], "k")
    assert asked(moved, policy).cache_salt != salt
    with pytest.raises(ModelNotFound):
        asked(free, without)
    assert asked(free, policy).cache_salt == salt


def test_an_alias_selects_the_model() -> None:
    call = a_call(chat() | {"model": "alias"})
    assert (call.asked_model, call.model.name) == ("alias", "m")


def test_the_first_matching_rule_selects_the_class() -> None:
    policy = a_policy(
        rules=[
            {"match": {"service_tier": "flex"}, "class": "batch"},
            {"match": {"header": {"X-Job": "night"}}, "class": "batch"},
            {"match": {"metadata": {"job": "1"}}, "class": "batch"},
            {"match": {"min_prompt_tokens": 1000}, "class": "batch"},
            {"match": {"tenant": "u", "key": ["k"]}, "class": "batch"},
        ]
    )
    assert a_call(policy=policy).class_name == "realtime"
    assert a_call(policy=policy).class_rule is None
    matching = [
        a_call(chat(service_tier="flex"), policy),
        a_call(policy=policy, headers={b"x-job": b"night"}),
        a_call(chat(metadata={"job": "1"}), policy),
        a_call(chat("word " * 1000), policy),
        a_call(policy=policy, tenant="u"),
    ]
    assert [call.class_rule for call in matching] == [0, 1, 2, 3, 4]
    assert {call.class_name for call in matching} == {"batch"}


def test_an_endpoint_may_have_a_class_of_its_own() -> None:
    assert set(get_args(EndpointName)) == {operation.value for operation in Operation}
    policy = a_policy(rules=[{"match": {"endpoint": "embeddings"}, "class": "batch"}])
    embedding = a_call({"model": "m", "input": "x"}, policy, operation=Operation.EMBEDDING)
    completion = a_call({"model": "m", "prompt": "x"}, policy, operation=Operation.COMPLETION)
    assert [each.class_name for each in (embedding, completion, a_call(policy=policy))] == [
        "batch", "realtime", "realtime",
    ]  # fmt: skip


def test_the_class_sets_the_deadline() -> None:
    policy = a_policy(classes={"realtime": {"total": "7s"}})
    assert a_call(policy=policy, now=100.0).deadline == 107.0


LONG = "All the world is a stage, and all the men and women merely players. " * 20


def test_equal_prompts_have_equal_fingerprints_in_any_notation() -> None:
    spaced = json.dumps(chat(LONG), indent=3).encode()
    parts = chat([{"type": "text", "text": LONG}])
    reordered = {"messages": chat(LONG)["messages"], "temperature": 0.5, "model": "alias"}
    fingerprints = {a_call(body).fingerprint for body in (chat(LONG), spaced, parts, reordered)}
    assert len(fingerprints) == 1
    assert len(fingerprints.pop()) == len(LONG) // 256


def test_a_longer_conversation_begins_with_the_shorter_ones_fingerprint() -> None:
    short = [{"role": "user", "content": LONG}]
    longer = [*short, {"role": "assistant", "content": LONG}, {"role": "user", "content": "continue"}]
    first = a_call({"model": "m", "messages": short}).fingerprint
    second = a_call({"model": "m", "messages": longer}).fingerprint
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_tenants_share_neither_fingerprints_nor_salts() -> None:
    mine, theirs = a_call(chat(LONG)), a_call(chat(LONG), tenant="u")
    assert not set(mine.fingerprint) & set(theirs.fingerprint)
    assert mine.cache_salt != theirs.cache_salt


def test_a_difference_changes_every_block_from_there_on() -> None:
    one, other = a_call(chat(LONG)).fingerprint, a_call(chat("X" + LONG[1:])).fingerprint
    assert len(one) == len(other)
    assert not set(one) & set(other)


def test_a_key_may_be_limited_to_some_classes() -> None:
    call = a_call()
    for classes, may in ((frozenset({"realtime"}), True), (frozenset({"batch"}), False)):
        principal = msgspec.structs.replace(call.principal, classes=classes)
        if may:
            assert load_and_canonicalise(principal).class_name == "realtime"
        else:
            with pytest.raises(Forbidden, match="the key 'k' may not use the class 'realtime'"):
                load_and_canonicalise(principal)


def load_and_canonicalise(principal: Principal) -> Call:
    return Canonicaliser(b"secret").canonicalise(
        ENDPOINTS[0], json.dumps(chat()).encode(), {}, call_id="id", principal=principal, policy=a_policy(), now=0.0,
        trace=UNTRACED,
    )  # fmt: skip


def test_the_shape_of_content_is_kept() -> None:
    """A template that reads only parts prints nothing of a string, and SGLang gives it the content as it was sent."""
    part = [{"type": "text", "text": "héllo"}]
    roles = ("system", "user", "assistant", "tool")
    messages = [{"role": role, "content": content} for role in roles for content in (part, "héllo", [*part, *part])]
    call = a_call({"model": "m", "messages": messages})
    assert call.canonical_steps == ("json_form",)
    assert msgspec.json.decode(call.fields["messages"]) == messages


@pytest.mark.parametrize("spaces", [(", ", ": "), (",", ":"), (", ", " : "), (",\n", ":")])
@pytest.mark.parametrize("text", ["hello", '{ "a": [ 1 ] }\n'])
def test_all_ways_to_write_json_have_one_form(spaces: tuple[str, str], text: str) -> None:
    """A text that looks like JSON with spaces does not make the body one."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    call = Canonicaliser(b"secret").canonicalise(
        ENDPOINTS[0], json.dumps(body, separators=spaces).encode(), {}, call_id="id",
        principal=Principal(a_policy().tenants[0], "key"), policy=a_policy(), now=0.0, trace=UNTRACED,
    )  # fmt: skip
    assert bytes(call.fields["messages"]) == msgspec.json.encode(body["messages"])


def test_level_off_leaves_the_body_alone() -> None:
    policy = a_policy(canonicalise={"level": "off"})
    call = a_call(chat([{"type": "text", "text": "x"}]), policy)
    assert call.canonical_steps == ()


def test_the_token_estimate_is_the_worst_case() -> None:
    assert a_call(chat(max_tokens=10, n=3)).max_output_tokens == 30
    assert a_call(chat(max_completion_tokens=7, max_tokens=9)).max_output_tokens == 7
    assert a_call(chat()).max_output_tokens is None


def test_token_id_prompts_are_counted_exactly() -> None:
    body = {"model": "m", "prompt": list(range(100)), "max_tokens": 4}
    assert a_call(body, operation=Operation.COMPLETION).prompt_tokens_estimate == 100
    nested = {"model": "m", "prompt": [[1, 2], [3, 4, 5]], "max_tokens": 4}
    several = a_call(nested, operation=Operation.COMPLETION)
    assert (several.prompt_tokens_estimate, several.max_output_tokens) == (5, 8)


def test_embeddings_have_no_fingerprint() -> None:
    call = a_call({"model": "m", "input": [LONG, LONG]}, operation=Operation.EMBEDDING)
    assert call.fingerprint == ()
    assert call.deterministic
    assert not call.stream


def test_session_names_of_tenants_never_collide() -> None:
    key, header = chat(prompt_cache_key="k"), {b"x-session-id": b"k"}
    assert a_call(chat()).session is None
    assert a_call(key).session == a_call(chat(), headers=header).session is not None
    assert a_call(key, headers={b"x-session-id": b"other"}).session == a_call(key).session
    assert a_call(key).session != a_call(key, tenant="u").session
