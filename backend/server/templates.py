"""Chat templates: converts messages to the text of a prompt as transformers' `apply_chat_template` does.

Templates are untrusted code that is distributed with the weights. They run in Jinja's immutable sandbox and can access
only plain JSON values. `ChatTemplate` also detects what a template supports, from its variables or from its output for
a sample conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

DEFAULT_NAME = "default"
TOOL_USE_NAME = "tool_use"

# Errors that a template raises if the messages lack what it expects.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


# A sample conversation whose last message has two parts. Its rendered text shows whether the template supports parts.
_PROBES = ("the first part", "and the second")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_EARLIER = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
)


class TemplateError(Exception):
    """The template rejected the messages, or the model has no suitable template."""


class ChatTemplate:
    """The named templates of one model and the special tokens that they can print."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._accepts_parts: dict[str, bool] = {}
        self._variables = frozenset[str]().union(
            *(jinja2.meta.find_undeclared_variables(environment.parse(source)) for source in sources.values())
        )

    def __bool__(self) -> bool:
        return bool(self._templates)

    def uses_variable(self, variable: str) -> bool:
        """Whether any template reads this variable, so that setting it can change the prompt."""
        return variable in self._variables

    @property
    def text(self) -> str:
        """The source of all templates, concatenated."""
        return "\n".join(self._sources.values())

    def mentions(self, text: str) -> bool:
        """Whether the source of any template contains this text."""
        return text in self.text

    def accepts_parts(self, role: str) -> bool:
        """Whether the template supports content that is a list of text parts in messages of this role."""
        if role not in self._accepts_parts:
            self._accepts_parts[role] = self._prints_each_part(role)
        return self._accepts_parts[role]

    @cached_property
    def wants_argument_text(self) -> bool:
        """Whether the template requires a tool call's arguments as JSON text, and not as an object. DeepSeek's do."""
        content = None if self.wants_null_content else ""
        return not self._prints_call({}, content) and self._prints_call("{}", content)

    @cached_property
    def wants_null_content(self) -> bool:
        """Whether the template prints tool calls only in messages whose content is null. DeepSeek V3's does."""

        def prints(content: str | None) -> bool:
            return self._prints_call({}, content) or self._prints_call("{}", content)

        return prints(None) and not prints("")

    def _prints_call(self, arguments: str | Mapping[str, Any], content: str | None) -> bool:
        call = {**_CALL, "function": {"name": _PROBES[0], "arguments": arguments}}
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        answer = {"role": "tool", "content": "", "tool_call_id": _CALL["id"]}
        try:
            return _PROBES[0] in self.render([{"role": "user", "content": "Hello"}, called, answer])
        except TemplateError:
            return False

    def _prints_each_part(self, role: str) -> bool:
        parts = [{"type": "text", "text": text} for text in _PROBES]
        earlier = {"system": (), "user": ()}.get(role, _EARLIER)
        try:
            text = self.render([*earlier, {"role": role, "content": parts, "tool_call_id": _CALL["id"]}])
        except TemplateError:
            return False
        # A template that expects strings prints the list as Python or JSON, with quoted texts, or omits it.
        return all(probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text for probe in _PROBES)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the prompt's text. Raises TemplateError with the template's message if it rejects the messages."""
        context = {
            **self._special_tokens,
            "documents": None,  # transformers always defines it
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._sample(tools).render(context)
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise TemplateError(f"The model's chat template rejected the messages: {error}") from error

    def _sample(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and TOOL_USE_NAME in self._templates:
            return self._templates[TOOL_USE_NAME]
        if DEFAULT_NAME in self._templates:
            return self._templates[DEFAULT_NAME]
        raise TemplateError("This model has no chat template; use /v1/completions.")


class _GenerationTag(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}`, which marks assistant text for training. Outputs the tag's body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter sorts keys and escapes HTML, but models are trained without either.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
