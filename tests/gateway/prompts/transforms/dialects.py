"""The chat templates of model families, each with its own way to read content and to print tools, and token ids.

The templates in `families/` are written for these tests. What matters is which values of a request each family can see,
in which order, and how it prints them. A server gives a template that knows only text the joined text of a message's
parts, as vLLM, SGLang, llama.cpp and the bundled engine do, and decodes the arguments of tool calls.

The environment variable `WARMPATH_CHAT_TEMPLATES` names a folder with the templates of models, for example llama.cpp's
`models/templates`. All tests then use these templates as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jinja2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import backend.demo_model
from backend.server.templates import ChatTemplate, TemplateError

DEMO_MODEL = Path(backend.demo_model.__file__).parent
FAMILIES = Path(__file__).parent / "families"
MARKS = (  # one token each, as in real vocabularies
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<start_of_image>", "<tool_call>", "</tool_call>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>",
    "<|end|>", "<|observation|>", "[gMASK]", "<sop>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|start_of_role|>",
    "<|end_of_role|>", "<|end_of_text|>", "<end_of_utterance>",
)  # fmt: skip
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":[1.0,"x"]}'}}
CHAT = [
    {"role": "system", "content": "You are X."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "This."},
    {"role": "user", "content": "And now?"},
]
AGENT = [
    *CHAT[:2],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "42"},
    *CHAT[2:],
]
CITY = {"type": "string", "description": "where"}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": []}
TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": PARAMETERS}}
TEMPLATE_FAULTS = (TypeError, ValueError, AttributeError, LookupError, RecursionError)
PrintsTools = Literal["as JSON", "as a list of properties", "not"]


class Dialect(NamedTuple):
    """One family's template. `knows_parts`: a server passes content to it as it was sent."""

    name: str
    source: str
    template: ChatTemplate
    knows_parts: bool
    prints_tools: PrintsTools

    @property
    def reads_text(self) -> bool:
        """Whether content that is a string is printed."""
        asked = {"messages": [{"role": "user", "content": "warm words"}], "tools": [TOOL]}
        return "warm words" in self.prompt(json.dumps(asked).encode())

    @property
    def conversation(self) -> list[Any] | None:
        """The first conversation that the template accepts: with tool calls, with a system prompt, or with neither."""
        for messages in (AGENT, CHAT, CHAT[1:]):
            if not self.prompt(json.dumps({"messages": messages, "tools": [TOOL]}).encode()).startswith("refused"):
                return messages
        return None

    def prompt(self, body: bytes) -> str:
        """The prompt that the bundled engine renders, or the template's error message."""
        asked = json.loads(body)
        tools, variables = asked.get("tools"), asked.get("chat_template_kwargs")
        try:
            return self.template.render(self._messages(asked), tools, variables)
        except TemplateError:  # some templates expect the arguments of tool calls as text
            try:
                return self.template.render(self._messages(asked, decoded=False), tools, variables)
            except TemplateError as refusal:
                return f"refused: {refusal}"

    def ids(self, body: bytes) -> Sequence[int] | str:
        """The prompt that transformers renders, or the template's error message."""
        asked = json.loads(body)
        try:
            ids = _tokenizer().apply_chat_template(
                self._messages(asked), tools=asked.get("tools") or None, chat_template=self.source,
                add_generation_prompt=True, return_dict=False, **(asked.get("chat_template_kwargs") or {}),
            )  # fmt: skip
        except (jinja2.TemplateError, *TEMPLATE_FAULTS) as refusal:
            return f"refused: {refusal}"
        return cast("list[int]", ids)  # as `return_dict` is false

    def _messages(self, asked: Any, *, decoded: bool = True) -> Any:
        messages = []
        for message in asked["messages"]:
            told = dict(message)
            if not self.knows_parts:
                told["content"] = _joined(message.get("content"))
            if decoded and "tool_calls" in message:
                told["tool_calls"] = [_decoded(call) for call in message["tool_calls"]]
            messages.append(told)
        return messages


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer, with the special tokens of all dialects."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "weights" / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "\n".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)


def _decoded(call: Any) -> Any:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _dialect(path: Path, prints_tools: PrintsTools, *, knows_parts: bool = False) -> Dialect:
    source = path.read_text("utf-8")
    return Dialect(path.stem, source, ChatTemplate({"default": source}, {}), knows_parts, prints_tools)


def _model_templates() -> Iterator[Dialect]:
    """The models' own templates that accept one of the conversations. What they print is seen from a prompt."""
    folder = os.environ.get("WARMPATH_CHAT_TEMPLATES")
    for path in sorted(Path(folder).glob("*.jinja")) if folder else ():
        source = path.read_text("utf-8")
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        dialect = Dialect(path.stem, source, template, template.accepts_parts("user"), "not")
        if (messages := dialect.conversation) is not None:
            prompt = dialect.prompt(json.dumps({"messages": messages, "tools": [TOOL]}).encode())
            listed: PrintsTools = "as a list of properties" if "city" in prompt else "not"
            yield dialect._replace(prints_tools="as JSON" if "properties" in prompt else listed)


DIALECTS = (
    _dialect(FAMILIES / "llama3.jinja", "as JSON"),
    _dialect(FAMILIES / "qwen2.5.jinja", "as JSON"),
    _dialect(FAMILIES / "qwen3.jinja", "as JSON"),
    _dialect(FAMILIES / "mistral.jinja", "as JSON", knows_parts=True),
    _dialect(FAMILIES / "gemma3.jinja", "not", knows_parts=True),
    _dialect(FAMILIES / "phi4.jinja", "as JSON"),
    _dialect(FAMILIES / "deepseek3.jinja", "not"),
    _dialect(FAMILIES / "glm4.5.jinja", "as JSON", knows_parts=True),
    _dialect(FAMILIES / "gpt_oss.jinja", "as a list of properties"),
    _dialect(FAMILIES / "granite.jinja", "as JSON"),
    _dialect(FAMILIES / "hermes.jinja", "as JSON"),
    _dialect(FAMILIES / "smolvlm.jinja", "not", knows_parts=True),
    _dialect(DEMO_MODEL / "chat_template.jinja", "as JSON", knows_parts=True),
    *_model_templates(),
)
