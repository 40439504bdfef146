"""LiteLLM's configuration as a policy: what is carried over, and the report of what is not."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gateway.policy import Policy
from gateway.policy.litellm_config import Converted, UnreadableConfig, convert

# The forms that LiteLLM's documentation shows, in one file.
CONFIG = """
model_list:
  - model_name: gpt-4o
    litellm_params:
      model: azure/gpt-4o-eu
      api_base: os.environ/AZURE_BASE
      api_key: os.environ/AZURE_KEY_EU
      api_version: "2025-01-01-preview"
      rpm: 600
      tpm: 100000
      weight: 3
      timeout: 300
    model_info: {id: eu, input_cost_per_token: 0.0000025, output_cost_per_token: 0.00001}
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, organization: org-1, weight: 1, temperature: 0.2}
  - model_name: claude
    litellm_params:
      model: claude-sonnet-4-5
      api_key: sk-secret
      extra_headers: {anthropic-beta: context-1m, x-team: os.environ/TEAM}
  - model_name: local
    litellm_params: {model: hosted_vllm/Qwen/Qwen3-8B, api_base: "http://10.0.0.5:8000/v1/", api_key: none}
  - model_name: small
    litellm_params: {model: ollama_chat/llama3.2, api_base: "http://10.0.0.6:11434"}
  - model_name: "groq/*"
    litellm_params: {model: "groq/*"}
  - model_name: bedrock
    litellm_params: {model: bedrock/anthropic.claude-v2, aws_region_name: us-east-1}
  - model_name: nowhere
    litellm_params: {model: openai/x, api_base: os.environ/UNKNOWN}
litellm_settings:
  drop_params: true
  fallbacks: [{gpt-4o: [claude, gone]}, {lost: [claude]}]
  context_window_fallbacks: [{small: [gpt-4o]}]
  content_policy_fallbacks: [{gpt-4o: [local]}]
  default_fallbacks: [local]
router_settings:
  routing_strategy: latency-based-routing
  model_group_alias: {gpt-4: gpt-4o, hidden: {model: local, hidden: true}}
general_settings: {master_key: sk-1234}
environment_variables: {AZURE_BASE: "https://eu.openai.azure.com/"}
mcp_servers: {}
"""


def converted(config: str = CONFIG) -> Converted:
    return convert(yaml.safe_load(config))


def test_deployments_are_carried_over() -> None:
    policy = Policy.model_validate(converted().policy)
    found: dict[str, Any] = {deployment.name: deployment for deployment in policy.deployments}
    azure, openai, claude = found["gpt-4o"], found["gpt-4o-2"], found["claude"]
    assert (azure.provider, azure.base_url, azure.model) == ("azure", "https://eu.openai.azure.com", "gpt-4o-eu")
    assert azure.api_key.env == "AZURE_KEY_EU" and azure.query == {"api-version": "2025-01-01-preview"}
    assert (azure.plan.requests.amount, azure.plan.tokens.amount) == (600, 100_000)
    assert (azure.price[0].input, azure.price[0].output) == (2.5, 10)
    assert (openai.base_url, openai.api_key.env) == ("https://api.openai.com/v1", "OPENAI_API_KEY")
    assert openai.defaults == {"temperature": 0.2} and openai.headers == {"OpenAI-Organization": "org-1"}
    assert (claude.provider, claude.model, claude.api_key.env) == (
        "anthropic",
        "claude-sonnet-4-5",
        "ANTHROPIC_API_KEY",
    )
    assert claude.headers["x-team"].env == "TEAM"
    local, small = found["local"], found["small"]
    assert (local.provider, local.base_url, local.model) == ("vllm", "http://10.0.0.5:8000/v1", "Qwen/Qwen3-8B")
    assert local.api_key is None
    assert (small.provider, small.base_url, small.api_key) == ("ollama", "http://10.0.0.6:11434/api", None)
    assert found["groq-all"].model == "*"


def test_models_have_their_weights_aliases_and_fallbacks() -> None:
    models = {model.name: model for model in Policy.model_validate(converted().policy).models}
    assert models.keys() == {"gpt-4o", "claude", "local", "small", "groq/*"}
    gpt = models["gpt-4o"]
    assert gpt.deployments == ("gpt-4o", "gpt-4o-2") and gpt.weights == {"gpt-4o": 3, "gpt-4o-2": 1}
    assert gpt.aliases == ("gpt-4",) and gpt.fallbacks == ("claude", "local")
    assert gpt.fallbacks_when.refused_content == ("local",)
    assert models["small"].fallbacks_when.context == ("gpt-4o",)
    assert models["local"].aliases == ("hidden",) and models["local"].fallbacks == ()


def test_what_is_not_carried_over_is_reported_by_its_path() -> None:
    omitted = dict(converted().omitted)
    assert "sk-secret" not in str(converted())
    assert omitted.keys() == {
        "model_list[0].litellm_params.timeout",
        "model_list[2].litellm_params.api_key",
        "model_list[6]",
        "model_list[7].litellm_params.api_base",
        "litellm_settings.drop_params",
        "litellm_settings.fallbacks.gpt-4o",
        "litellm_settings.fallbacks.lost",
        "router_settings.routing_strategy",
        "general_settings.master_key",
        "environment_variables.AZURE_BASE",
        "mcp_servers",
    }
    assert "LiteLLM behind the gateway" in omitted["model_list[6]"]
    assert "UNKNOWN" in omitted["model_list[7].litellm_params.api_base"]


def with_params(params: str) -> Converted:
    return converted(f"model_list: [{{model_name: a, litellm_params: {{model: openai/a, {params}}}}}]")


def test_no_secret_is_repeated() -> None:
    """A secret that is written in the file is reported, and replaced by a reference to an environment variable."""
    found = converted("""
model_list:
  - model_name: a
    litellm_params:
      model: openai/a
      api_key: SECRET-1
      api_base: https://user:SECRET-2@host/v1?key=SECRET-3
      extra_headers: {Authorization: Bearer SECRET-4, x-api-key: SECRET-5, x-other: Bearer SECRET-6, x-team: blue}
      extra_body: {token: SECRET-7, max_tokens: 9, inner: {api_key: SECRET-8}}
  - {model_name: a, litellm_params: {model: openai/b, api_key: SECRET-9}}
  - {model_name: a, litellm_params: {model: openai/c, api_key: SECRET-1, aws_secret_access_key: SECRET-10}}
litellm_settings: {fallbacks: [{a: [{model: b, api_key: SECRET-11}]}]}
general_settings: {master_key: SECRET-12}
environment_variables: {KEY: SECRET-13}
""")
    assert "SECRET" not in str(found)
    first, second, third = found.policy["deployments"]
    variables = [each["api_key"]["env"] for each in (first, second, third)]
    assert variables == ["OPENAI_API_KEY", "OPENAI_API_KEY_2", "OPENAI_API_KEY"], "one for each secret"
    assert first["base_url"] == "https://host/v1"
    assert first["headers"] == {
        "Authorization": {"env": "UPSTREAM_AUTHORIZATION"},
        "x-api-key": {"env": "UPSTREAM_X_API_KEY"},
        "x-other": {"env": "UPSTREAM_X_OTHER"},
        "x-team": "blue",
    }
    assert first["overrides"] == {"max_tokens": 9, "inner": {}}
    where = "model_list[0].litellm_params"
    assert {
        f"{where}.api_key",
        f"{where}.api_base",
        f"{where}.extra_headers.Authorization",
        f"{where}.extra_body.token",
        f"{where}.extra_body.inner.api_key",
    } <= dict(found.omitted).keys()


@pytest.mark.parametrize(
    ("params", "path", "message"),
    [
        ("rpm: .inf", ".litellm_params.rpm", "must be a number"),
        ("tpm: .nan", ".litellm_params.tpm", "must be a number"),
        ("rpm: '5'", ".litellm_params.rpm", "must be a number"),
        ("weight: .inf", ".litellm_params.weight", "must be a positive number"),
        (f"tpm: 0x{'f' * 6000}", ".litellm_params.tpm", "must be a number"),
        ("max_parallel_requests: many", ".litellm_params", "max_concurrency: a count is a whole number"),
        ("region_name: 5", ".litellm_params", "region: must be text"),
        ("extra_headers: 5", ".litellm_params.extra_headers", "must be a mapping"),
        ("extra_headers: {a b: c}", ".litellm_params", "headers: 'a b' is not the name of a header"),
        ("additional_drop_params: 5", ".litellm_params.additional_drop_params", "must be a list"),
        ("input_cost_per_token: much", ".model_info.input_cost_per_token", "is not a price"),
        ("input_cost_per_token: .nan", ".model_info.input_cost_per_token", "is not a price"),
        ("output_cost_per_token: 1e+300", ".model_info", "output: Decimal input should have no more than"),
    ],
)
def test_wrong_values_are_reported(params: str, path: str, message: str) -> None:
    """The deployment is carried over without them."""
    found = with_params(params)
    Policy.model_validate(found.policy)
    assert {"max_concurrency", "plan", "region", "price"}.isdisjoint(found.policy["deployments"][0])
    ((where, advice),) = found.omitted
    assert where == f"model_list[0]{path}" and advice.startswith(message)


def test_settings_of_wrong_types_are_reported() -> None:
    config = """
model_list:
  - 9
  - {model_name: a, litellm_params: 7}
  - {model_name: a, litellm_params: {model: openai/}}
  - {model_name: a, litellm_params: {model: openai/a, api_base: "http://["}}
  - {model_name: a, litellm_params: {model: openai/a}}
litellm_settings: {fallbacks: [{a: 5}, 6], context_window_fallbacks: 7, default_fallbacks: 5}
router_settings: {model_group_alias: {x: [1], y: {model: [2]}}}
general_settings: 5
environment_variables: [6]
"""
    found = converted(config)
    assert len(Policy.model_validate(found.policy).deployments) == 1
    assert {path for path, _ in found.omitted} == {
        "model_list[0]",
        "model_list[1]",
        "model_list[1].litellm_params",
        "model_list[2].litellm_params",
        "model_list[3].litellm_params.api_base",
        "litellm_settings.fallbacks.a",
        "litellm_settings.fallbacks",
        "litellm_settings.context_window_fallbacks",
        "litellm_settings.default_fallbacks",
        "router_settings.model_group_alias.x",
        "router_settings.model_group_alias.y",
        "general_settings",
        "environment_variables",
    }


def test_a_price_may_be_written_as_a_power() -> None:
    """YAML 1.1 reads `1e-06` as a text."""
    (deployment,) = with_params("input_cost_per_token: 1e-06").policy["deployments"]
    assert deployment["price"] == [{"input": "1", "version": "litellm"}]


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "{}",
        "model_list: []",
        "model_list: [5, {}]",
        "model_list: [{model_name: a, litellm_params: {model: b/c}}]",
    ],
)
def test_a_file_without_models_is_an_error(config: str) -> None:
    with pytest.raises(UnreadableConfig):
        converted(config)
