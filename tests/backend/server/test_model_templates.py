"""Tool call formats by models' chat templates: the detected format reads the calls that the template itself prints.

Templates print the calls of earlier assistant messages as the model writes them, so they are the reference for the
parsers. The templates of `tests/gateway` are written after families of models. `WARMPATH_CHAT_TEMPLATES` names a folder
with real ones, such as those that llama.cpp and vLLM publish, one `.jinja` file for each model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend import parsers
from backend.parsers.base import CallableTool, ContentText, OutputEvent, ToolCallArguments, ToolCallStart
from backend.parsers.chained import ChainedParser
from backend.server.errors import InvalidRequest
from backend.server.model import ServedModel
from backend.server.prompts import render_chat
from backend.server.request_body import decode_body
from backend.server.requests import ChatRequest
from backend.server.templates import ChatTemplate

FOLDER = os.environ.get("WARMPATH_CHAT_TEMPLATES")
FAMILIES = Path(__file__).parents[2] / "gateway" / "prompts" / "transforms" / "families"
HARMONY = parsers.REASONING_FORMATS["harmony"]  # of which the parser of calls reads the output
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}}
ARGUMENTS = {"city": 'Zürich "HB" {8004}', "days": 3, "units": ["C", "%"]}
PLAIN = {"city": "Zürich"}  # for templates that print quotes around values without escaping what is in them

# By the beginning of a file's name, in lower case and without the publisher: the format that must be detected.
EXPECTED = {
    "deepseek3": "deepseek_v3",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "deepseek-ai-deepseek-r1": "deepseek_v3",
    "deepseek-ai-deepseek-v3.1": "deepseek_v31",
    "tool_chat_template_deepseekv3.": "deepseek_v3",
    "tool_chat_template_deepseekr1": "deepseek_v3",
    "tool_chat_template_deepseekv31": "deepseek_v31",
    "glm": "glm",
    "qwen3-coder": "qwen3_coder",
    "qwen3.5": "qwen3_coder",
    "tool_chat_template_qwen3coder": "qwen3_coder",
    "nvidia-nemotron-3-nano": "qwen3_coder",
    "qwen3.jinja": "hermes",
    "qwen-qwen2.5": "hermes",
    "qwen-qwen3": "hermes",
    "qwen-qwq": "hermes",
    "nousresearch": "hermes",
    "hermes": "hermes",
    "kimi-k2": "kimi",
    "moonshotai-kimi-k2": "kimi",
    "granite": "granite",
    "ibm-granite-granite-3": "granite",
    "tool_chat_template_granite.": "granite",
    "ibm-granite-granite-4": "hermes",
    "tool_chat_template_phi4": "phi4",
    "meta-llama": "llama3",
    "llama3": "llama3",
    "tool_chat_template_llama3.1_json": "llama3",
    "tool_chat_template_llama4_pythonic": "pythonic",
    "tool_chat_template_llama3.2_pythonic": "pythonic",
    "mistral": "mistral",
    "unsloth-mistral": "mistral",
    "openai-gpt-oss": "harmony",
}
# Templates that print no calls, or not as the model is to write them, or of models whose format is not known.
PRINT_NO_CALLS = {
    "bytedance-seed-oss": "prints lists as Python does",
    "fireworks-ai-llama-3-firefunction": "needs a variable `functions`",
    "kimi-k2-": "calls list.append, which transformers' sandbox refuses, too",
    "llama-cpp-deepseek-r1": "prints a generator, which is not JSON for transformers either",
    "llm-jp": "writes Harmony with spaces between the parts of a header",
    "meetkai-functionary": "has a format of its own",
    "minimax": "has a format of its own",
    "unsloth-apriel": "has a format of its own",
    "deepseek-ai-deepseek-r1": "prints calls only after an earlier message with content",
    "ibm-granite-granite-3": "prints earlier calls as plain content",
    "tool_chat_template_phi4_mini": "prints earlier calls without the marker that the model is to write",
}


def model_templates() -> list[Path]:
    """Those of `tests/gateway` that print calls as a model writes them, and the real ones."""
    families = [FAMILIES / f"{name}.jinja" for name in ("deepseek3", "glm4.5", "granite", "hermes", "llama3", "qwen3")]
    return sorted([*families, *(Path(FOLDER).glob("*.jinja") if FOLDER else ())])


def listed(path: Path, names: dict[str, str]) -> str | None:
    """The entry with the longest key that the file's name begins with."""
    found = [key for key in names if path.name.lower().startswith(key)]
    return names[max(found, key=len)] if found else None


def rendered(source: str, messages: list[Any]) -> str:
    body = {"model": "m", "messages": messages, "tools": [TOOL]}
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    model = cast(ServedModel, SimpleNamespace(template=ChatTemplate({"default": source}, SPECIAL_TOKENS)))
    return render_chat(model, request.messages, request.tools, add_generation_prompt=len(messages) == 1)


def calls_in(events: list[OutputEvent]) -> list[tuple[str, Any]]:
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
    texts = dict.fromkeys(names, "")
    for event in events:
        if isinstance(event, ToolCallArguments):
            texts[event.index] += event.text
    return [(name, json.loads(texts[index])) for index, name in names.items()]


@pytest.mark.parametrize("path", [p for p in model_templates() if listed(p, EXPECTED)], ids=lambda path: path.stem)
def test_the_format_is_detected(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert parsers._detect(parsers._TOOL_SIGNS, source) == listed(path, EXPECTED)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("path", model_templates(), ids=lambda path: path.stem)
def test_the_detected_format_reads_what_the_template_prints(path: Path, num_calls: int) -> None:
    source = path.read_text(encoding="utf-8")
    tools, tools_name = parsers.tool_format(parsers.AUTO, source), parsers._detect(parsers._TOOL_SIGNS, source)
    if tools_name == "harmony" and num_calls > 1:
        pytest.skip("one call for each output")
    if tools is None:
        assert listed(path, EXPECTED) is None
        pytest.skip("no known format")
    if reason := listed(path, PRINT_NO_CALLS):
        pytest.skip(reason)
    question = {"role": "user", "content": "Will it rain?"}
    given = [PLAIN if tools.begins == "" and tools.starts == "[" else ARGUMENTS | {"days": i} for i in range(num_calls)]
    calls = [
        {
            "id": tools.new_id("weather", i),
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(arguments)},
        }
        for i, arguments in enumerate(given)
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
    try:
        text, prompt = rendered(source, [question, answer]), rendered(source, [question])
    except InvalidRequest as error:
        assert num_calls > 1, error
        pytest.skip(str(error))
    same = next((i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), len(prompt))
    text = text[max(text.rfind(end, 0, same) for end in "\n>]") + 1 :]  # not in the middle of a marker
    if tools_name == "harmony":
        text = " to=" + text.partition(" to=")[2]  # the prompt ends with the role
    offered = [CallableTool("weather", SCHEMA)]
    for size in (len(text), 3):
        parser = ChainedParser(HARMONY.parser(prompt) if tools_name == "harmony" else None, tools.parser(offered))
        events = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
        events += parser.finish()
        assert calls_in(events) == [("weather", arguments) for arguments in given], text
        content = "".join(event.text for event in events if isinstance(event, ContentText))
        assert "weather" not in content
