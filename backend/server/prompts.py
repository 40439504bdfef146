"""From what a client wrote to the token ids that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from backend.server.errors import InvalidRequest
from backend.server.messages import AssistantMessage, Content, Message, ToolMessage
from backend.server.model import ServedModel
from backend.server.requests import ChatRequest
from backend.server.templates import TemplateError
from backend.server.tokenizer import TextCodec

Prompt = str | list[int]

# Marks the end of a final message that is to be continued: templates trim messages, and print text behind them in which
# a short message can be found again.
_GOES_ON = "<<the answer goes on here>>"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    token_ids: list[int]


def chat_prompt(model: ServedModel, request: ChatRequest) -> ChatPrompt:
    """Raises InvalidRequest for what the template refuses, or would leave out without a word."""
    if request.tools and request.tool_choice != "none" and not model.template.reads("tools"):
        raise InvalidRequest("This model's chat template has no `tools`.", param="tools")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if not model.template.reads("reasoning_effort"):
            raise InvalidRequest("This model's chat template has no `reasoning_effort`.", param="reasoning_effort")
        variables["reasoning_effort"] = request.reasoning_effort
    text = render_chat(
        model,
        request.messages,
        request.tools,
        variables,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
    )
    if request.add_special_tokens:
        return ChatPrompt(text, model.codec.encode(text, add_special_tokens=True))
    return ChatPrompt(text, model.codec.encode_chat(text, request.cache_salt or ""))


def render_chat(
    model: ServedModel,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    # Newer models know the developer role; for the others it is OpenAI's later word for the system's.
    keeps_developer = model.template.mentions("developer")
    plain = [_plain_message(message, f"messages[{i}]", keeps_developer) for i, message in enumerate(messages)]
    if continue_final_message:
        plain[-1]["content"] += _GOES_ON
    try:
        text = model.template.render(plain, tools or None, variables, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise InvalidRequest(str(error), param="messages") from error
    return _without_what_follows(text) if continue_final_message else text


def _without_what_follows(text: str) -> str:
    """Up to the end of the final message, so that the answer goes on in the middle of it."""
    message, mark, _ = text.rpartition(_GOES_ON)
    if not mark:
        raise InvalidRequest("The chat template does not print the final message.", param="continue_final_message")
    return message


def split_prompts(given: str | list[str | list[int] | int], param: str) -> list[Prompt]:
    """The four forms that prompts and embedding inputs come in: text, texts, token ids, lists of token ids."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"`{param}` is empty.", param=param)
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        return list(texts)
    lists = [item for item in given if isinstance(item, list)]
    if len(lists) == len(given):
        return list(lists)
    raise InvalidRequest(f"`{param}` mixes texts and token ids.", param=param)


def encode_prompts(
    model: ServedModel, prompts: list[Prompt], param: str, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Raises InvalidRequest for a prompt without any token, which no model can go on from."""
    encode = partial(model.codec.encode, add_special_tokens=add_special_tokens)
    encoded = []
    for prompt in prompts:
        token_ids = encode(prompt) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise InvalidRequest(f"`{param}` has no tokens.", param=param)
        model.check_token_ids(token_ids, param)
        encoded.append(token_ids)
    return encoded


def prompt_text(codec: TextCodec, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else codec.decode(prompt, skip_special_tokens=False)


def _plain_message(message: Message, path: str, keeps_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not keeps_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": _plain_content(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        plain |= _assistant_extras(message, path)
    return plain


def _plain_content(content: Content | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content or ())  # as vLLM joins parts for templates that print strings


def _assistant_extras(message: AssistantMessage, path: str) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if message.tool_calls:
        extras["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    # Templates print arguments with `tojson`, so a string would come out quoted twice.
                    "arguments": _arguments(call.function.arguments, f"{path}.tool_calls[{i}].function.arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        extras |= {"reasoning_content": reasoning, "thinking": reasoning}  # the two names that templates read
    return extras


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"`{path}` is not a JSON object: {error}.", param=path) from error
