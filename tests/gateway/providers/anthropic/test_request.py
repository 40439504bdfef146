"""Translation of a chat to a Messages request, checked against the types of Anthropic's SDK."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BadRequest
from gateway.policy import Deployment
from gateway.providers import make_provider
from gateway.providers.anthropic.fields import FIELDS
from gateway.providers.base import Fault, ProviderFailure
from gateway.providers.transport import HTTPTransport
from gateway.settings import resolve_secret
from gateway.types import Operation
from tests.gateway.calls import a_call
from tests.gateway.providers.anthropic.sdk import read_request

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a town", "parameters": {"type": "object"}},
}
BREAKPOINT = {"type": "ephemeral"}
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000  # nested too deeply for the JSON decoder


def provider(**fields: Any) -> Any:
    named = {"name": "d", "provider": "anthropic", "base_url": "http://a.invalid/v1", "model": "claude"}
    return make_provider(Deployment.model_validate({**named, **fields}), HTTPTransport(), resolve_secret)


PROVIDER = provider()


def rendered(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The request for a chat that disables automatic cache breakpoints."""
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    return sent(*messages, **explicit, **fields)


def sent(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The request for a chat."""
    chat_messages = list(messages) or [{"role": "user", "content": "hi"}]
    call = a_call({"model": "m", "messages": chat_messages, **fields})
    assert provider().unsupported_error(call) is None
    return read_request(provider().render(call))


def rejected_param(*messages: dict[str, Any], **fields: Any) -> str:
    """The path of the field that the error names."""
    chat_messages = list(messages) or [{"role": "user", "content": "hi"}]
    call = a_call({"model": "m", "messages": chat_messages, **fields})
    with pytest.raises(ProviderFailure) as raised:
        provider().render(call)
    error = json.loads(raised.value.body)["error"]
    assert (raised.value.fault, raised.value.status) == (Fault.UNSUPPORTED, 400)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{error['param']}: ")
    return str(error["param"])


def user(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def tool_call(identity: str, arguments: str = '{"town":"Rome"}', name: str = "weather") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_minimal_request() -> None:
    turn = {"role": "user", "content": [text("hi")]}
    assert rendered() == {"model": "claude", "max_tokens": 8192, "messages": [turn]}
    call = a_call({"model": "m", "messages": [user()], "stream": True})
    assert read_request(provider().render(call))["stream"] is True


def test_leading_system_messages_become_the_system_prompt_and_later_ones_stay() -> None:
    request = rendered(
        {"role": "system", "content": "be kind"}, {"role": "developer", "content": [text("be short")]}, user(),
        {"role": "system", "content": "now be loud"}, user("again"),
    )  # fmt: skip
    assert request["system"] == [text("be kind"), text("be short")]
    assert [turn["role"] for turn in request["messages"]] == ["user", "system", "user"]


def test_adjacent_messages_of_one_role_become_one_turn_and_empty_ones_are_dropped() -> None:
    request = rendered(
        user("one"), user([text("two"), text("")]), user(""), {"role": "assistant", "content": ""}, user("three")
    )  # fmt: skip
    assert request["messages"] == [{"role": "user", "content": [text("one"), text("two"), text("three")]}]


def test_tools_and_a_turn_with_two_tool_calls() -> None:
    request = rendered(
        user("weather?"),
        {"role": "assistant", "content": "I look.", "tool_calls": [tool_call("call_1"), tool_call("f.weather:0", "")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "f.weather:0", "content": [text("rain"), text("wind")]},
        user("thanks"),
        tools=[TOOL, {"type": "function", "function": {"name": "now", "strict": True}}],
    )  # fmt: skip
    assert request["tools"] == [
        {"name": "weather", "description": "of a town", "input_schema": {"type": "object"}},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}, "strict": True},
    ]
    asked, answered, results = request["messages"]
    assert asked["role"] == results["role"] == "user"
    assert answered["content"] == [
        text("I look."),
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Rome"}},
        {"type": "tool_use", "id": "f_weather_0", "name": "weather", "input": {}},
    ]
    assert results["content"] == [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [text("sun")]},
        {"type": "tool_result", "tool_use_id": "f_weather_0", "content": [text("rain"), text("wind")]},
        text("thanks"),
    ]


def test_arguments_are_sent_byte_for_byte() -> None:
    """A changed byte would miss the prefix cache."""
    arguments = '{"b": 1.0,  "a":"\\u00e9"}'
    call = a_call(
        {"model": "m", "messages": [user(), {"role": "assistant", "tool_calls": [tool_call("c", arguments)]}]}
    )
    assert f'"input":{arguments}'.encode() in provider().render(call)


def test_images_and_files() -> None:
    request = rendered(
        user(
            [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
                {"type": "image_url", "image_url": {"url": "https://pictures.example/1.png"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,BBBB", "filename": "a.pdf"}},
            ]
        )
    )
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "BBBB"}
    assert request["messages"][0]["content"] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "https://pictures.example/1.png"}},
        {"type": "document", "source": pdf, "title": "a.pdf"},
    ]


def test_signed_thinking_is_sent_back_and_unsigned_is_not() -> None:
    request = rendered(
        user(),
        {
            "role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [tool_call("c")],
            "thinking_blocks": [
                {"index": 0, "type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "not from there"},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
        {"role": "assistant", "content": "fine", "reasoning_content": "not signed"},
    )  # fmt: skip
    assert request["messages"][1]["content"][:2] == [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    assert len(request["messages"][1]["content"]) == 3
    assert request["messages"][3]["content"] == [text("fine")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"stop": "x"}, {"stop_sequences": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_sequences": ["x", "y"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"user": "u"}, {"metadata": {"user_id": "u"}}),
        ({"user": "u", "safety_identifier": "s"}, {"metadata": {"user_id": "s"}}),
        ({"service_tier": "auto"}, {"service_tier": "auto"}),
        ({"service_tier": "flex"}, {"service_tier": "standard_only"}),
        ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}),
        ({"reasoning_effort": "minimal"}, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}),
        ({"reasoning_effort": "max"}, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 10_192},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, {"thinking": {"type": "disabled"}}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"thinking": {"type": "adaptive"}}),
        ({"response_format": {"type": "text"}}, {}),
        (
            dict.fromkeys(
                ["response_format", "temperature", "stop", "tools", "user", "thinking", "max_tokens", "seed"]
            ),
            {},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        ({"n": 1, "logprobs": False, "logit_bias": {}, "presence_penalty": 0.0, "seed": None, "store": False}, {}),
        ({"metadata": {"a": "b"}, "prompt_cache_key": "k", "prediction": {}, "modalities": ["text"]}, {}),
        ({"tool_choice": "auto"}, {}),
    ],
)
def test_translated_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = rendered(**fields)
    least = {"model": "claude", "max_tokens": 8192}
    del request["messages"]
    assert request == {**least, **expected}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"parallel_tool_calls": True}, None),
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "none"}, {"type": "none"}),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {"type": "none"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False},
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        ),
    ],
)
def test_the_choice_of_tools(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert rendered(tools=[TOOL], **fields).get("tool_choice") == expected


def test_the_policy_s_default_max_tokens_applies_without_a_limit() -> None:
    call = a_call()
    assert read_request(provider(default_max_tokens="32k").render(call))["max_tokens"] == 32_000


def breakpoints(request: dict[str, Any]) -> list[str]:
    """What each breakpoint follows: a tool's name, a text or a result's id."""
    content = [block for turn in request["messages"] for block in turn["content"]]
    blocks = [*request.get("tools", []), *request.get("system", []), *content]
    for block in blocks:
        assert block.get("cache_control") in (None, BREAKPOINT)
    return [
        block.get("name") or block.get("text") or block.get("tool_use_id")
        for block in blocks
        if "cache_control" in block
    ]


def test_breakpoints_follow_the_parts_that_the_next_call_repeats() -> None:
    system = {"role": "system", "content": "rules"}
    assert breakpoints(sent(user("one"))) == ["one"]
    first = [system, user("one")]
    assert breakpoints(sent(*first, tools=[TOOL])) == ["weather", "rules", "one"]
    second = [
        *first,
        {"role": "assistant", "tool_calls": [tool_call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    assert breakpoints(sent(*second, tools=[TOOL])) == ["weather", "rules", "one", "c"]
    third = [*second, {"role": "assistant", "content": "fine"}, user("two"), user("three")]
    assert breakpoints(sent(*third, tools=[TOOL])) == ["weather", "rules", "c", "three"]


def test_the_client_s_breakpoints_replace_the_automatic_ones() -> None:
    minutes, hour = BREAKPOINT, {"type": "ephemeral", "ttl": "1h"}
    request = sent(
        {"role": "system", "content": [text("rules", cache_control=hour), text("more")]},
        user([text("one", cache_control=minutes), text("two")]),
        {"role": "assistant", "tool_calls": [tool_call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": [text("sun", cache_control=minutes)]},
        user("three", cache_control=minutes),
        tools=[{**TOOL, "cache_control": hour}],
    )
    assert request["tools"][0]["cache_control"] == request["system"][0]["cache_control"] == hour
    contents = [turn["content"] for turn in request["messages"]]
    assert [[block.get("cache_control") for block in content] for content in contents] == [
        [minutes, None], [None], [minutes, minutes]
    ]  # fmt: skip
    assert "cache_control" not in contents[2][0]["content"][0]
    assert breakpoints(sent(user([text("one", prompt_cache_breakpoint={"mode": "explicit"}), text("two")]))) == ["one"]
    assert sent(cache_control=minutes)["cache_control"] == minutes
    assert breakpoints(sent(cache_control=minutes)) == breakpoints(rendered()) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"logprobs": True}, {"top_logprobs": 3}, {"logit_bias": {"1": 5}}, {"seed": 7}, {"temperature": 1.5},
        {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"audio": {"voice": "x"}}, {"store": True},
        {"modalities": ["text", "audio"]}, {"functions": [{"name": "f"}]}, {"web_search_options": {}},
        {"verbosity": "low"}, {"service_tier": "fast"}, {"reasoning_effort": "huge"}, {"min_p": 0.1},
        {"workspace_id": "w"}, {"container": "c"}, {"speed": "fast"}, {"mcp_servers": []},
    ],
)  # fmt: skip
def test_an_unsupported_field_is_rejected_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert rejected_param(**fields) == name


def test_the_policy_may_omit_a_field() -> None:
    lenient, call = provider(leave_out=["seed"]), a_call({"model": "m", "messages": [user()], "seed": 7})
    assert lenient.unsupported_error(call) is None
    assert "seed" not in read_request(lenient.render(call))


def test_unsupported_error_checks_top_level_fields_and_the_operation() -> None:
    refusal = provider().unsupported_error(a_call({"model": "m", "messages": [user()], "seed": 7}))
    assert json.loads(refusal.body)["error"]["param"] == "seed"
    for operation, body in ((Operation.COMPLETION, {"prompt": "x"}), (Operation.EMBEDDING, {"input": "x"})):
        refusal = provider().unsupported_error(a_call({"model": "m", **body}, operation=operation))
        assert operation.value in json.loads(refusal.body)["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user([{"type": "input_audio", "input_audio": {}}])], "messages[0].content[0].type"),
        ([user([{"type": "image_url", "image_url": {"url": "ftp://x"}}])], "messages[0].content[0].image_url.url"),
        ([user([{"type": "image_url"}])], "messages[0].content[0].image_url"),
        ([user([{"type": "file", "file": {"file_id": "f"}}])], "messages[0].content[0].file.file_id"),
        ([user([{"type": "text", "text": 3}])], "messages[0].content[0].text"),
        ([{"role": "system", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([user(), {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([user(), {"role": "assistant", "function_call": {"name": "f"}}], "messages[1].function_call"),
        (
            [{"role": "assistant", "tool_calls": [tool_call("c", "[1]")]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": [tool_call("c", DEEP)]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}], "messages[0].tool_calls[0].type"),
    ],
)
def test_an_unsupported_message_is_rejected_by_its_path(messages: list[dict[str, Any]], param: str) -> None:
    assert rejected_param(*messages) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"stop": [1]}, "stop[0]"),
        ({"chat_template_kwargs": {"date": "today"}}, "chat_template_kwargs"),
    ],
)
def test_an_unsupported_value_is_rejected_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert rejected_param(**fields) == param


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2)
    | st.sampled_from(["", "x", "auto", "user", "none"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)
_FIELDS = sorted({*FIELDS.translated, *FIELDS.ignored, *FIELDS.neutral, "something_new"} - {"model", "messages"})
_PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "refusal", "image_url", "file", "input_audio"])},
    optional=dict.fromkeys(("text", "refusal", "image_url", "file", "cache_control", "prompt_cache_breakpoint"), _JSON),
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "bot"])},
    optional={
        "content": st.none() | st.text(max_size=3) | st.lists(_PART, max_size=2),
        "tool_calls": st.lists(
            st.builds(tool_call, st.text(max_size=3), st.sampled_from(["", "{}", "[", "1"])), max_size=2
        ),
        **dict.fromkeys(("tool_call_id", "refusal", "thinking_blocks", "audio", "function_call"), _JSON),
    },
)


@given(st.lists(_MESSAGE, min_size=1, max_size=4), st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_every_valid_chat_is_rendered_or_rejected_by_name(
    messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    try:
        call = a_call({"model": "m", "messages": messages, **fields})
    except BadRequest:
        return
    refusal = PROVIDER.unsupported_error(call)
    try:
        request = json.loads(PROVIDER.render(call))
    except ProviderFailure as failure:
        assert json.loads(failure.body)["error"]["param"]
    else:
        assert refusal is None
        assert sum("cache_control" in json.dumps(turn) for turn in request["messages"]) <= len(messages)
        assert all(turn["content"] for turn in request["messages"])
        roles = [turn["role"] for turn in request["messages"]]
        assert all(one != other for one, other in itertools.pairwise(roles))
