"""The shipped policies are valid, their schema is fresh, and the default policy shows every field."""

import re
import typing
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from pydantic import BaseModel

from gateway.policy import DnsSource, KubernetesSource, Policy, Secret, Source, UpstreamTLS
from gateway.policy.deployments import Mirror, UpstreamProxy
from gateway.policy.file import load_policy, policy_schema
from gateway.policy.hooks import Hook
from gateway.policy.located_yaml import load
from gateway.policy.sign_in import SignIn, SignInRole
from gateway.policy.webhooks import Webhook
from gateway.server.policy_checks import ANYWHERE
from tests.gateway.calls import a_call, chat

POLICIES = Path(__file__).parents[3] / "policies"
FILES = sorted(POLICIES.rglob("*.yaml"))
SCHEMA = jsonschema_rs.validator_for(policy_schema())


def fields_of(model: type[BaseModel]) -> set[tuple[type[BaseModel], str]]:
    """Every field of a model and of the models in it, by the name that a file uses."""
    found = {(defining_model(model, name), field.alias or name) for name, field in model.model_fields.items()}
    for field in model.model_fields.values():
        for part in models_in(field.annotation):
            found |= fields_of(part)
    return found


def defining_model(model: type[BaseModel], name: str) -> type[BaseModel]:
    """The model that defines a field, so that an inherited field counts as shown if any subclass shows it."""
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel) and name in base.model_fields]
    return bases[-1]


def models_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for argument in typing.get_args(annotation) for model in models_in(argument)}


def fields_shown(model: type[BaseModel], value: Any) -> set[tuple[type[BaseModel], str]]:
    """Every field that a document sets, mappings and lists included."""
    if isinstance(value, list):
        return set().union(*(fields_shown(model, item) for item in value))
    if not isinstance(value, dict):
        return set()
    names = {field.alias or name: field for name, field in model.model_fields.items()}
    if not value.keys() <= names.keys():  # a mapping of names to models, as `classes`
        return set().union(*(fields_shown(model, item) for item in value.values()))
    attributes = {field.alias or name: name for name, field in model.model_fields.items()}
    shown = {(defining_model(model, attributes[name]), name) for name in value}
    for name, item in value.items():
        for part in models_in(names[name].annotation):
            shown |= fields_shown(part, item)
    return shown


SOURCES = (Source, DnsSource, KubernetesSource)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(POLICIES)))
def test_every_shipped_policy_is_valid_for_the_gateway_and_for_editors(path: Path) -> None:
    load_policy(path, checks=ANYWHERE)
    document = load(path.read_text()).data
    assert [error.message for error in SCHEMA.iter_errors(document)] == []
    link = re.match(r"# yaml-language-server: \$schema=(\S+)\n", path.read_text())
    assert link is not None
    assert (path.parent / link[1]).resolve() == POLICIES / "policy.schema.json"


def test_the_examples_are_there() -> None:
    assert {"default.yaml", "vllm.yaml", "mixed.yaml"} <= {path.name for path in FILES}


def test_the_published_schema_is_fresh() -> None:
    assert (POLICIES / "policy.schema.json").read_text() == policy_schema(), (
        "policy.schema.json is stale: warmpath check --schema > policies/policy.schema.json"
    )


def test_the_default_policy_shows_every_field() -> None:
    text = (POLICIES / "default.yaml").read_text()
    hidden = fields_of(Policy) - fields_shown(Policy, load(text).data)
    files = {(UpstreamTLS, name) for name in UpstreamTLS.model_fields}
    assert hidden == {
        *((Secret, name) for name in Secret.model_fields),
        *files,
        *((Webhook, name) for name in Webhook.model_fields),
        *((model, name) for model in (SignIn, SignInRole) for name in model.model_fields),
        *((UpstreamProxy, name) for name in UpstreamProxy.model_fields),
        *((Mirror, name) for name in Mirror.model_fields),
        *((Hook, name) for name in Hook.model_fields),
        *((source, name) for source in SOURCES for name in source.model_fields),
    }  # a default policy that needs a secret, a file, a cluster, a proxy or a second deployment would not start
    in_comments = set(re.findall(r"(\w+):", "\n".join(line for line in text.splitlines() if line.startswith("#"))))
    assert {name for source in SOURCES for name in source.model_fields} <= in_comments
    assert re.search(r"api_key: null +#.*\{env: \w+\}", text)


@pytest.mark.parametrize(
    ("tier", "class_name"),
    [("flex", "batch"), ("priority", "realtime"), ("auto", "realtime"), ("default", "realtime"), (None, "realtime")],
)
def test_the_default_policy_maps_service_tiers_to_classes(tier: str | None, class_name: str) -> None:
    policy = load_policy(POLICIES / "default.yaml", checks=ANYWHERE)
    body = chat(service_tier=tier) | {"model": "warmpath-demo"}
    assert a_call(body, policy, tenant="dev").class_name == class_name
    # Another rule does not move a call that pays for priority to batch; a call without a tier it does.
    nightly = a_call({**body, "metadata": {"job": "nightly"}}, policy, tenant="dev").class_name
    assert nightly == ("realtime" if tier == "priority" else "batch")


def test_every_field_of_the_default_policy_has_a_comment_at_its_first_use() -> None:
    """Either on its own line, or directly above its block."""
    lines = (POLICIES / "default.yaml").read_text().splitlines()
    seen: set[str] = set()
    bare = []
    for number, line in enumerate(lines):
        match = re.match(r"\s*(?:- )?(\w+):", line)
        if match is None or match[1] in seen:
            continue
        seen.add(match[1])
        above = lines[number - 1].lstrip().startswith("#")
        parent = lines[number - 1].rstrip().endswith(":") and lines[number - 2].startswith("#")
        if not ("  #" in line or " #" in line or above or parent):
            bare.append(match[1])
    assert set(bare) <= {"realtime", "batch", "match", "class", "limits", "budget"}  # explained by the block's comment


def test_every_field_of_the_policy_has_a_description() -> None:
    for model, alias in fields_of(Policy):
        (field,) = [f for name, f in model.model_fields.items() if (f.alias or name) == alias]
        assert field.description, f"{model.__name__}.{alias}"


@pytest.mark.parametrize(
    "change",
    [
        {"cahce": {}},
        {"cache": {"ttl": "soon"}},
        {"rules": [{"match": {"header": {"a": 1}}, "class": "batch"}]},
        {"tenants": [{"name": "t", "limits": {"requests": "600"}}]},
        {"tracing": {"sample": "x"}},
    ],
)
def test_the_schema_reports_mistakes_in_editors(change: dict[str, Any]) -> None:
    document = load((POLICIES / "default.yaml").read_text()).data
    assert not SCHEMA.is_valid({**document, **change})
