"""A model's chat template: messages in, prompt text out, as transformers' `apply_chat_template` renders it.

Templates come with the weights, from strangers, so they run in Jinja's immutable sandbox and see plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

DEFAULT_NAME = "default"
TOOL_USE_NAME = "tool_use"

# A template is a program that we did not write: what it expects and the messages lack surfaces as any of these.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


# A conversation to be rendered for what becomes of the parts of its last message.
_PROBES = ("the first part", "and the second")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_EARLIER = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
)


class TemplateError(Exception):
    """The template refused the conversation, or there is none that fits."""


class ChatTemplate:
    """The named templates of one model, and the special tokens that they may print."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        self._takes_parts: dict[str, bool] = {}
        self._variables = frozenset[str]().union(
            *(jinja2.meta.find_undeclared_variables(environment.parse(source)) for source in sources.values())
        )

    def __bool__(self) -> bool:
        return bool(self._templates)

    def reads(self, variable: str) -> bool:
        """Whether a variable of this name can change the prompt."""
        return variable in self._variables

    @property
    def text(self) -> str:
        """All that the templates say, one after the other."""
        return "\n".join(self._sources.values())

    def mentions(self, text: str) -> bool:
        return text in self.text

    def takes_parts(self, role: str) -> bool:
        """Whether the content of a message may be a list of texts, which the template then prints in its own way."""
        if role not in self._takes_parts:
            self._takes_parts[role] = self._prints_parts(role)
        return self._takes_parts[role]

    def _prints_parts(self, role: str) -> bool:
        probe = [{"type": "text", "text": text} for text in _PROBES]
        earlier = {"system": (), "user": ()}.get(role, _EARLIER)
        try:
            text = self.render([*earlier, {"role": role, "content": probe, "tool_call_id": _CALL["id"]}])
        except TemplateError:
            return False
        # A template that knows strings only prints the list itself, with its keys, or nothing of it.
        return all(said in text and f"'{said}'" not in text and f'"{said}"' not in text for said in _PROBES)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises TemplateError with the template's own words if it refuses."""
        context = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._choose(tools).render(context)
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise TemplateError(f"The model's chat template refused the messages: {error}") from error

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and TOOL_USE_NAME in self._templates:
            return self._templates[TOOL_USE_NAME]
        if DEFAULT_NAME in self._templates:
            return self._templates[DEFAULT_NAME]
        raise TemplateError("This model has no chat template; use /v1/completions.")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt its body is all that counts."""

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
    # Jinja's own filter sorts keys and escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
