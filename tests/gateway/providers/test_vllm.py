"""vLLM, SGLang and the bundled engine: fields beyond OpenAI's dialect, token counters and token counting."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.core.kv_transfer import PREFILL, load_from
from gateway.core.passed_requests import PassedRequest
from gateway.policy import Deployment
from gateway.prompts.reader import ADVISORY_FIELDS
from gateway.providers import make_provider, vllm
from gateway.providers.transport import HTTPTransport
from gateway.providers.vllm import read_counters
from gateway.types import Operation
from tests.contract.provider_calls import answering, call, resolve_nothing
from tests.gateway.providers.scripted_server import ReceivedRequest, ScriptedServer, json_response

FORGED = b'{"cache_salt": "of another tenant", "priority": -9, "kv_transfer_params": {"remote_host": "x"}}'


def rendered(provider: str, **how: Any) -> dict[str, Any]:
    deployment = Deployment(name="d", provider=provider, base_url="http://x/v1", model="m")
    body = make_provider(deployment, HTTPTransport(), resolve_nothing).render(call(FORGED, **how))
    fields: dict[str, Any] = msgspec.json.decode(body)
    return fields


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.COMPLETION])
def test_the_cache_salt_and_priority_are_the_gateway_s(operation: Operation) -> None:
    vllm = {"model": "m", "cache_salt": "salt-of-the-tenant"}
    assert rendered("vllm", operation=operation) == vllm
    assert rendered("warmpath", operation=operation) == {**vllm, "priority": 10}


@pytest.mark.parametrize("provider", ["warmpath", "vllm"])
def test_an_engine_is_told_from_where_to_load_blocks(provider: str) -> None:
    def params(source: str | None) -> Any:
        deployment = Deployment(name="d", provider=provider, base_url="http://x/v1", model="m")
        transfer = None if source is None else load_from(source)
        request = msgspec.structs.replace(call(FORGED), kv_transfer=transfer)
        body = make_provider(deployment, HTTPTransport(), resolve_nothing).render(request)
        return msgspec.json.decode(body).get("kv_transfer_params")

    expected = {"do_remote_prefill": True, "remote_host": "fd00::1", "remote_port": 8001}
    assert params("http://[fd00::1]:8001/v1") == expected
    assert params("http://engine-b/v1") == expected | {"remote_host": "engine-b", "remote_port": 80}
    assert params(None) is None


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_prefill_asks_for_one_token_of_the_same_prompt(limit: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}], "tools": [], "add_generation_prompt": True}
    shape = {"stream": True, "n": 3, "min_tokens": 5, "logprobs": True, "top_logprobs": 2, limit: 99}
    deployment = {"name": "d", "provider": "vllm", "base_url": "http://x/v1", "model": "m"}
    overrides = {"max_tokens": 500} if limit == "max_tokens" else {}  # of the policy, for answers
    configured = Deployment.model_validate({**deployment, "overrides": overrides})
    made = make_provider(configured, HTTPTransport(), resolve_nothing)
    request = msgspec.structs.replace(call(msgspec.json.encode({**prompt, **shape})), kv_transfer=PREFILL)
    assert msgspec.json.decode(made.render(request)) == {
        **prompt, "model": "m", "cache_salt": "salt-of-the-tenant", limit: 1,
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        },
    }  # fmt: skip


def test_priorities_are_sent_on_the_scale_of_each_server() -> None:
    deployment = {"name": "d", "base_url": "http://x/v1", "model": "m", "priorities": True}
    for provider, priority in (("vllm", 10), ("sglang", -10), ("warmpath", 10)):
        made = make_provider(
            Deployment.model_validate({**deployment, "provider": provider}), HTTPTransport(), resolve_nothing
        )
        assert msgspec.json.decode(made.render(call(FORGED)))["priority"] == priority
    assert "priority" not in rendered("sglang")


def test_reserved_fields_of_sglang_are_removed() -> None:
    forged = b'{"rid": "r", "extra_key": "k", "session_params": {}, "bootstrap_host": "x", "cache_salt": "y"}'
    made = make_provider(
        Deployment(name="d", provider="sglang", base_url="http://x/v1", model="m"), HTTPTransport(), resolve_nothing
    )
    assert msgspec.json.decode(made.render(call(forged))) == {"model": "m", "cache_salt": "salt-of-the-tenant"}


def test_an_effort_that_is_only_a_hint_goes_to_the_chat_template() -> None:
    made = make_provider(
        Deployment(name="d", provider="warmpath", base_url="http://x/v1", model="m"), HTTPTransport(), resolve_nothing
    )
    required = call(b'{"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": true}}')
    hinted = msgspec.structs.replace(required, hints=frozenset({"reasoning_effort"}))
    assert msgspec.json.decode(made.render(required))["reasoning_effort"] == "low"
    fields = msgspec.json.decode(made.render(hinted))
    assert "reasoning_effort" not in fields
    assert fields["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize("provider", ["warmpath", "anthropic", "gemini", "ollama"])
def test_a_verbosity_that_is_only_a_hint_is_omitted(provider: Any) -> None:
    made = make_provider(
        Deployment(name="d", provider=provider, base_url="http://x/v1", model="m"), HTTPTransport(), resolve_nothing
    )
    required = call(b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "verbosity": "low"}')
    hinted = msgspec.structs.replace(required, hints=ADVISORY_FIELDS)
    assert made.unsupported_error(hinted) is None
    assert b"verbosity" not in made.render(hinted)
    if provider != "warmpath":  # the engine rejects it itself
        assert made.unsupported_error(required) is not None


def test_what_the_bundled_engine_computes_has_a_salt_and_a_priority_and_what_it_tokenises_a_salt() -> None:
    ours = {"model": "m", "cache_salt": "salt-of-the-tenant", "priority": 10}
    for provider, expected in (("vllm", {"model": "m"}), ("warmpath", ours)):
        assert rendered(provider, operation=Operation.EMBEDDING) == expected
        made = make_provider(
            Deployment(name="d", provider=provider, base_url="http://x/v1", model="m"), HTTPTransport(), resolve_nothing
        )
        for name in ("rerank", "v2/rerank", "score"):
            passed = PassedRequest(name, f"/{name}", "application/json", 2)
            request = msgspec.structs.replace(call(FORGED, operation=Operation.PASSED), passed=passed, has_prefix=False)
            assert msgspec.json.decode(made.render(request)) == expected
        for name in ("tokenize", "detokenize"):
            passed = PassedRequest(name, f"/{name}", "application/json", 2)
            request = msgspec.structs.replace(call(FORGED, operation=Operation.PASSED), passed=passed, has_prefix=False)
            without_priority = {field: value for field, value in expected.items() if field != "priority"}
            assert msgspec.json.decode(made.render(request)) == without_priority


def test_usage_is_requested_at_the_end_of_a_stream() -> None:
    for provider in ("vllm", "warmpath"):
        options = rendered(provider, stream=True)["stream_options"]
        assert options == {"include_usage": True}


def test_the_openai_provider_passes_on_unknown_fields() -> None:
    assert rendered("openai") == {"model": "m", **msgspec.json.decode(FORGED)}


METRICS = b"""# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.25e+06
vllm:prompt_tokens_total{engine="1",model_name="m"} 7
vllm:prompt_tokens_total{engine="0",model_name="other"} 3.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e9
vllm:generation_tokens_total{engine="0",model_name="m"} 46.0
warmpath:unwanted_tokens_total{engine="0",model_name="m"} 5.0
"""


@pytest.mark.parametrize(
    ("metrics", "model", "expected"),
    [
        (METRICS, b"m", (1_250_007, 46, 5)),
        (METRICS, b"other", (3, 0, 0)),
        (METRICS, b"an alias", (1_250_010, 46, 5)),
        (b"vllm:prompt_tokens_total 5\nvllm:generation_tokens_total 6\n", b"m", (5, 6, 0)),
        (
            b'sglang:prompt_tokens_total{model_name="m"} 5.0\nsglang:generation_tokens_total{model_name="m"} 6.0\n',
            b"m",
            (5, 6, 0),
        ),
        (b"process_cpu_seconds_total 5\n", b"m", None),
        (
            b"vllm:prompt_tokens_total NaN\nvllm:generation_tokens_total +Inf\nvllm:prompt_tokens_total -5\n"
            b"vllm:prompt_tokens_total 1e300\nvllm:prompt_tokens_total many\nvllm:generation_tokens_total 6\n",
            b"m",
            (0, 6, 0),
        ),
    ],
)
def test_read_counters(metrics: bytes, model: bytes, expected: tuple[int, int, int] | None) -> None:
    assert read_counters(metrics, model) == expected


def test_usage_in_every_chunk_is_requested_if_the_policy_enables_it() -> None:
    deployment = Deployment(name="d", provider="vllm", base_url="http://x/v1", model="m", continuous_usage=True)
    body = make_provider(deployment, HTTPTransport(), resolve_nothing).render(call(FORGED, stream=True))
    options = msgspec.json.decode(body)["stream_options"]
    assert options == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(("provider_name", "salted"), [("vllm", False), ("warmpath", True)])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (json_response(b'{"count":7,"max_model_len":4096,"tokens":[1,2,3,4,5,6,7]}'), 7),
        (json_response(b'{"detail":"Not Found"}', "404 Not Found"), None),
        (json_response(b"[]"), None),
    ],
)
async def test_a_prompt_is_counted_by_the_server_s_tokenizer(
    answer: bytes, expected: int | None, provider_name: str, salted: bool
) -> None:
    fields = b'{"model": "ours", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}'
    async with HTTPTransport() as transport, ScriptedServer(answering(answer)) as server:
        deployment = Deployment(name="d", provider=provider_name, base_url=server.base_url, model="m")
        provider = make_provider(deployment, transport, resolve_nothing)
        assert await provider.count_prompt_tokens(call(fields)) == expected
    (received,) = server.requests
    assert received.head == "POST /tokenize HTTP/1.1"
    salt = {"cache_salt": "salt-of-the-tenant"} if salted else {}
    assert msgspec.json.decode(received.body) == {"model": "m", "messages": [{"role": "user", "content": "hi"}], **salt}


async def test_the_openai_provider_counts_no_tokens() -> None:
    deployment = Deployment(name="d", provider="openai", base_url="http://127.0.0.1:9/v1", model="m")
    provider = make_provider(deployment, HTTPTransport(), resolve_nothing)
    assert await provider.count_prompt_tokens(call()) is None
    assert await provider.token_counters() is None


async def test_a_late_record_is_awaited_if_no_client_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "RECORD_WAITS_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(vllm, "PATIENT_WAITS_SECONDS", (0.0, 0.0, 0.0))

    async def on_the_third_poll(received: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        late = len(server.requests) % 3 == 0
        writer.write(json_response(b'{"id": "r"}') if late else json_response(b"{}", "404 Not Found"))

    async with ScriptedServer(on_the_third_poll) as server, HTTPTransport() as transport:
        deployment = Deployment(name="d", provider="warmpath", base_url=server.base_url, model="m")
        provider = make_provider(deployment, transport, resolve_nothing)
        assert await provider.recorded_usage("r", patient=True) == b'{"id": "r"}'
        assert await provider.recorded_usage("r") is None
        assert len(server.requests) == 5
