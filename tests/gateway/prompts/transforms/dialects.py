"""Chat templates in the styles of the field, each with its own way to read content and to print tools, and token ids.

Written for these tests: what matters is which values of a request each can see, and how it prints them. A server
gives a template that knows only text the joined text of a message's parts, as vLLM, SGLang and llama.cpp do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import backend.demo_model
from backend.server.templates import ChatTemplate, TemplateError

DEMO_MODEL = Path(backend.demo_model.__file__).parent
MARKS = (  # one token each, as in real vocabularies
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "<bos>", "<start_of_turn>", "<end_of_turn>",
    "<start_of_image>", "<tool_call>", "</tool_call>",
)  # fmt: skip

CHATML = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}# Tools\n<tools>
{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n
{%- elif messages[0].role == 'system' -%}
<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
<|im_start|>assistant\n{{ message.content or '' }}
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
    {%- for call in message.tool_calls or [] %}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{
      call.function.arguments if call.function.arguments is string else call.function.arguments | tojson
    }}}\n</tool_call>{% endfor -%}<|im_end|>\n
  {%- elif message.role == 'tool' -%}
<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n
  {%- elif not (loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}
"""

LLAMA = """
{{- '<|begin_of_text|>' -}}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string or '26 Jul 2024' }}\n\n
{%- if tools -%}
You have these functions:\n\n{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor -%}
{%- endif -%}
{{ system }}<|eot_id|>
{%- for message in rest -%}
  {%- if message.tool_calls -%}
    {%- if message.tool_calls | length != 1 -%}{{ raise_exception('one tool call at a time') }}{%- endif -%}
<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{
    message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
  {%- elif message.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>
  {%- else -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>\n\n{%- endif -%}
"""

MISTRAL = """
{%- macro words(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content -%}{% if part.type == 'text' %}{{ part.text }}{% else %}[IMG]{% endif %}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
<s>
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if tools and loop.last -%}
[AVAILABLE_TOOLS][
      {%- for tool in tools -%}
{"type": "function", "function": {
        {%- for key, value in tool.function.items() if key != 'return' -%}
          {%- if value is string -%}"{{ key }}": "{{ value }}"{%- else -%}"{{ key }}": {{ value | tojson }}{%- endif -%}
          {%- if not loop.last %}, {% endif -%}
        {%- endfor -%}}}
        {%- if not loop.last %}, {% endif -%}
      {%- endfor -%}
][/AVAILABLE_TOOLS]
    {%- endif -%}
[INST]{{ words(message.content) }}[/INST]
  {%- elif message.role == 'system' -%}
[SYSTEM_PROMPT]{{ words(message.content) }}[/SYSTEM_PROMPT]
  {%- elif message.role == 'tool' -%}
[TOOL_RESULTS]{"content": {{ words(message.content) }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
  {%- elif message.role == 'assistant' -%}
    {%- if message.tool_calls -%}
[TOOL_CALLS][{% for call in message.tool_calls %}{{ call.function | tojson }}{{ call.id }}{% endfor %}]
    {%- endif -%}
{{ words(message.content or '') }}</s>
  {%- else -%}
{{ raise_exception('roles are user, assistant, system and tool') }}
  {%- endif -%}
{%- endfor -%}
"""

GEMMA = """
{{- '<bos>' -}}
{%- if messages[0].role == 'system' -%}
  {%- set first = messages[0].content if messages[0].content is string else messages[0].content[0].text -%}
  {%- set rest = messages[1:] -%}
{%- else -%}
  {%- set first = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n
  {%- if loop.first and first -%}{{ first }}\n\n{%- endif -%}
  {%- if message.content is string -%}{{ message.content | trim }}
  {%- elif message.content -%}
    {%- for part in message.content -%}
      {%- if part.type == 'text' -%}{{ part.text | trim }}{%- else -%}<start_of_image>{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
<end_of_turn>\n
{%- endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model\n{%- endif -%}
"""

HERMES = """
{%- macro schema(spec) -%}
  {%- for name, field in spec.properties.items() -%}
{{ name }}: {{ field.type if field.type is string else field.type | tojson }}
    {%- if field.default is defined %} = {{ field.default }}{% endif %}{% if not loop.last %}, {% endif -%}
  {%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system\nYou may call functions within <tools></tools>: <tools>
  {%- for tool in tools %}\n{"type": "function", "function": {{ tool.function | tojson }}}
    {%- if tool.function.parameters and tool.function.parameters.properties %} #({{ schema(tool.function.parameters) }})
    {%- endif -%}
  {%- endfor %}\n</tools><|im_end|>\n
{%- endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}\n
  {%- if message.role == 'tool' -%}<tool_response>{{ message.content }}</tool_response>
  {%- else -%}{{ message.content or '' }}
    {%- for call in message.tool_calls or [] %}\n<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
  {%- endif -%}<|im_end|>\n
{%- endfor -%}
"""


class Dialect(NamedTuple):
    name: str
    source: str
    template: ChatTemplate
    knows_parts: bool

    def prompt(self, body: bytes) -> str:
        """The prompt that the bundled engine renders, or the template's error message."""
        asked = json.loads(body)
        try:
            return self.template.render(self._messages(asked), asked.get("tools"), asked.get("chat_template_kwargs"))
        except TemplateError as refusal:
            return f"refused: {refusal}"

    def ids(self, body: bytes) -> Sequence[int] | str:
        """The prompt that transformers renders, or the template's error message."""
        asked = json.loads(body)
        try:
            ids: list[int] = _tokenizer().apply_chat_template(
                self._messages(asked), tools=asked.get("tools") or None, chat_template=self.source,
                add_generation_prompt=True, return_dict=False, **(asked.get("chat_template_kwargs") or {}),
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError) as refusal:
            return f"refused: {refusal}"
        return ids

    def _messages(self, asked: Any) -> Any:
        if self.knows_parts:
            return asked["messages"]
        return [{**message, "content": _joined(message.get("content"))} for message in asked["messages"]]


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer, with the special tokens of all dialects."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "weights" / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "\n".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)


def _dialect(name: str, source: str, *, knows_parts: bool) -> Dialect:
    return Dialect(name, source, ChatTemplate({"default": source}, {}), knows_parts)


DIALECTS = (
    _dialect("chatml", CHATML, knows_parts=False),
    _dialect("llama", LLAMA, knows_parts=False),
    _dialect("mistral", MISTRAL, knows_parts=True),
    _dialect("gemma", GEMMA, knows_parts=True),
    _dialect("hermes", HERMES, knows_parts=False),
    _dialect("demo", (DEMO_MODEL / "chat_template.jinja").read_text("utf-8"), knows_parts=True),
)
