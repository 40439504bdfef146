"""Rendered prompts and their ids equal those of transformers' apply_chat_template for the same directory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from backend.model_files import open_model_files
from backend.server.errors import InvalidRequest
from backend.server.model import load_model
from backend.server.prompts import chat_prompt, render_chat
from backend.server.request_body import decode_body
from backend.server.requests import ChatRequest
from backend.server.templates import ChatTemplate, TemplateError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "<b>für & wider</b>",
            "parameters": {"type": "object", "properties": {"zip": {"type": "string"}, "at": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"zip": "8004", "at": "ü"}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello, world!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 東京 🙂 <|im_end|> \n\n x "}],
    [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "no", "tool_call_id": "call_1"},
    ],
]
# What published templates use beyond plain Jinja.
DIALECT = """{%- set ns = namespace(last='') %}
{%- for message in messages %}
  {%- if loop.index0 > 3 %}{% break %}{% endif %}
  {%- set ns.last = message.role %}
  {% generation %}{{ message.content | trim }}{% endgeneration %}
{%- endfor %}
{{ ns.last }} {{ bos_token }} {{ {'b': 1, 'a': '<ü>'} | tojson }} {{ [1, 2] | tojson(indent=2) }}
{%- if strftime_now('%Y') | length == 4 %} dated{% endif %} {{ mood | default('calm') }}"""


def as_transformers_wants(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """transformers expects tool arguments as objects, OpenAI's API as a string."""
    plain: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in plain:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


@pytest.mark.parametrize(
    ("source", "fields", "param"),
    [
        ("{{ messages[0].content }}", {"tools": TOOLS}, "tools"),
        ("{{ messages[0].content }}", {"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ("{{ messages[0].content }}", {"tools": TOOLS, "tool_choice": "none"}, None),
        ("{{ messages[0].content }}", {"tools": []}, None),
        ("{{ messages[0].content }}", {"documents": [{"text": "a"}]}, "documents"),
        ("{{ messages[0].content }}", {"documents": []}, None),
        ("{% for document in documents %}{{ document.text }}{% endfor %}", {"documents": [{"text": "a"}]}, None),
        ("{{ messages[0].content }}", {"reasoning_effort": "low"}, "reasoning_effort"),
        # Like the start of Llama 3.1's.
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", {"tools": TOOLS}, None),
    ],
)
def test_fields_that_the_template_ignores_are_rejected(
    checkpoint: Path, source: str, fields: dict[str, Any], param: str | None
) -> None:
    model = replace(load_model(checkpoint, "m", "m", 512), template=ChatTemplate({"default": source}, {}))
    body = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}], **fields}
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    if param is None:
        assert chat_prompt(model, request).token_ids
        return
    with pytest.raises(InvalidRequest) as caught:
        chat_prompt(model, request)
    assert caught.value.param == param


@pytest.mark.parametrize("final", ["I would say ", "e", "end", "im_", "\n\n"])
def test_a_continued_message_equals_transformers(checkpoint: Path, final: str) -> None:
    """Including a message whose text occurs again in what the template prints after it."""
    messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": final}]
    oracle = AutoTokenizer.from_pretrained(checkpoint)
    expected = oracle.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    request = decode_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    rendered = render_chat(
        load_model(checkpoint, "m", "m", 256),
        request.messages,
        None,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert rendered == expected


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_prompt_and_ids_equal_transformers(
    checkpoint: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    oracle = AutoTokenizer.from_pretrained(checkpoint)
    model = load_model(checkpoint, "m", "m", 256)
    request = decode_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    text = render_chat(model, request.messages, tools)
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
    converted = as_transformers_wants(messages)
    assert text == oracle.apply_chat_template(converted, tokenize=False, **options)
    ids = model.codec.encode(text, add_special_tokens=False)
    assert ids == oracle.apply_chat_template(converted, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("extra", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_plain_prompts_get_the_special_tokens_that_transformers_gives(
    checkpoint: Path, tmp_path: Path, tokenizer_class: str, extra: dict[str, bool]
) -> None:
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / file).write_bytes((checkpoint / file).read_bytes())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | extra | {"tokenizer_class": tokenizer_class}))
    model = load_model(tmp_path, "m", "m", 256)
    for text in ("Hello, world!", " naïve  東京 🙂", "<|im_end|>x", ""):
        assert (
            model.codec.encode(text, add_special_tokens=True) == AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
        )


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("call.function.arguments | tojson", '{"zip": "8004"}'), ("'' + call.function.arguments", '{"zip":"8004"}')],
)
def test_arguments_are_text_for_templates_that_concatenate_them(checkpoint: Path, printed: str, expected: str) -> None:
    printed = f"{{{{ call.function.name }}}}{{{{ {printed} }}}}"
    calls = "{% for call in m.tool_calls or () %}" + printed + "{% endfor %}"
    source = "{% for m in messages if m.content is none %}" + calls + "{% endfor %}"
    model = replace(load_model(checkpoint, "m", "m", 256), template=ChatTemplate({"default": source}, {}))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"zip":"8004"}'}}
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    request = decode_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    assert render_chat(model, request.messages, None) == f"weather{expected}"


def test_extensions_that_published_templates_use(checkpoint: Path, tmp_path: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(checkpoint)
    template = ChatTemplate({"default": DIALECT}, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}]
    cases: list[dict[str, Any]] = [{}, {"mood": "glad"}]
    for variables in cases:
        assert template.render(messages, None, variables) == oracle.apply_chat_template(
            messages, chat_template=DIALECT, tokenize=False, add_generation_prompt=True, **variables
        )
    assert template.uses_variable("mood")
    assert not template.uses_variable("reasoning_effort")


def load(directory: Path) -> ChatTemplate:
    return ChatTemplate(open_model_files(directory).chat_templates(), {})


def test_templates_are_found_in_all_their_locations(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    messages = [{"role": "user", "content": "hi"}]
    assert not load(tmp_path)
    config.write_text(json.dumps({"chat_template": "one {{ messages[0].content }}"}))
    assert load(tmp_path).render(messages) == "one hi"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load(tmp_path).render(messages) == "plain"
    assert load(tmp_path).render(messages, TOOLS) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    assert load(tmp_path).render(messages) == "the file wins"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[5].content.upper() }}", "rejected"),
        ("{{ messages.append(1) }}", "rejected"),
        ("{{ ''.__class__.__mro__ }}", "rejected"),
        ("{{ 1 / 0 }}", "rejected"),
    ],
)
def test_a_failure_in_a_template_is_a_template_error(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_rejects_chats() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate({}, {}).render([])


def test_parts_are_joined_by_lines_and_developer_becomes_system(checkpoint: Path) -> None:
    model = load_model(checkpoint, "m", "m", 256)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "m", "messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]}
    text = render_chat(model, decode_body(json.dumps(body).encode(), ChatRequest).messages, None)
    assert "<|im_start|>system\nd<|im_end|>" in text
    assert "<|im_start|>user\na\nb<|im_end|>" in text


PRINTS_PARTS = """{%- for message in messages -%}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content %}[{{ part.text }}]{% endfor %}
{%- endif -%}
{%- endfor -%}"""


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (PRINTS_PARTS, True),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{% for message in messages %}{{ message.content | tojson }}{% endfor %}", False),
        ("{% for message in messages %}{{ '> ' + message.content }}{% endfor %}", False),
        ("{% for message in messages if message.content is string %}{{ message.content }}{% endfor %}", False),
    ],
)
def test_a_template_that_supports_parts_gets_them(source: str, takes: bool, role: str) -> None:
    assert ChatTemplate({"default": source}, {}).accepts_parts(role) == takes


def test_a_template_formats_parts_itself(checkpoint: Path, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_bytes((checkpoint / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(PRINTS_PARTS)
    model = load_model(tmp_path, "m", "m", 256)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": parts}]
    request = decode_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    assert render_chat(model, request.messages, None) == "a[a][b]"
    open_ended = render_chat(model, request.messages, None, add_generation_prompt=False, continue_final_message=True)
    assert open_ended == "a[a][b"


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", '{"zip": '])
def test_invalid_arguments_become_an_empty_object(checkpoint: Path, arguments: str) -> None:
    """Models write arguments. A conversation with truncated ones can continue."""
    model = load_model(checkpoint, "m", "m", 256)
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    messages = [*CONVERSATIONS[2][:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    request = decode_body(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    assert '"arguments": {}' in render_chat(model, request.messages, None)


def test_cache_breakpoints_do_not_change_the_prompt(checkpoint: Path) -> None:
    model, mark = load_model(checkpoint, "m", "m", 256), {"cache_control": {"type": "ephemeral"}}

    def prompt(mark: dict[str, Any]) -> str:
        part, call, tool = {"type": "text", "text": "Rain?", **mark}, {**CALL, **mark}, {**TOOLS[0], **mark}
        messages = [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": "", "tool_calls": [call], **mark},
            {"role": "tool", "content": "no", "tool_call_id": "call_1", **mark},
        ]
        request = decode_body(
            json.dumps({"model": "m", "messages": messages, "tools": [tool], **mark}).encode(), ChatRequest
        )
        request.check()
        return chat_prompt(model, request).text

    assert prompt(mark) == prompt({})
