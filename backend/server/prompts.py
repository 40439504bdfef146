"""Converts the prompt of a request to token ids: applies the chat template, tokenizes and truncates.

`chat_prompt` renders messages and encodes the text. `split_prompts` and `encode_prompts` handle the text and token
prompts of completions and embeddings. `PromptTruncator` implements vLLM's `truncate_prompt_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from backend.engine.image_encoder import EncoderImage
from backend.engine.prompt_images import PromptImages
from backend.server.errors import InvalidRequest
from backend.server.messages import (
    BREAKPOINT,
    AssistantMessage,
    Content,
    ImagePart,
    Message,
    TextContent,
    TextPart,
    ToolMessage,
)
from backend.server.model import ServedModel
from backend.server.requests import ChatRequest, TruncationFields
from backend.server.templates import ChatTemplate, TemplateError
from backend.server.tokenizer import TextCodec

Prompt = str | list[int]
Json = dict[str, Any]

# This text is appended to a final message that the model continues. It marks the message's end in the rendered text.
# Searching for the message itself is unsafe: templates trim messages, and a short message can occur again after it.
_CONTINUE_HERE = "<<the output continues here>>"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Prompt of a chat: its text after the chat template, and its token ids. `text` is never truncated."""

    text: str
    token_ids: list[int]
    images: PromptImages | None = None  # None: the prompt is text


@dataclass(frozen=True, slots=True)
class PromptTruncator:
    """Truncates a prompt to `max_tokens` by removing tokens at its left or right end."""

    max_tokens: int
    side: Literal["left", "right"]

    def __call__(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self.max_tokens :] if self.side == "left" else token_ids[: self.max_tokens]


def prompt_truncator(
    model: ServedModel, fields: TruncationFields, room: int, side: Literal["left", "right"]
) -> PromptTruncator | None:
    """Returns the truncator that the request asks for, if any. Raises InvalidRequest.

    `room` is the number of tokens available for the prompt. `side` is the default side.
    """
    field = "truncate_prompt_tokens"
    if fields.truncate_prompt_tokens is None:
        return None
    max_tokens = max(1, room) if fields.truncate_prompt_tokens == -1 else fields.truncate_prompt_tokens
    if not 0 < max_tokens <= model.max_model_len:
        raise InvalidRequest(f"`{field}` must be -1, or from 1 to {model.max_model_len}.", param=field)
    return PromptTruncator(max_tokens, fields.truncation_side or side)


def chat_prompt(model: ServedModel, request: ChatRequest, images: Sequence[EncoderImage] = ()) -> ChatPrompt:
    """Renders a chat with the chat template and encodes it. `images`: those of its messages, in their order.

    Raises InvalidRequest if the template rejects the messages, or if the request has `tools`, `reasoning_effort` or
    `documents` and the template would ignore them.
    """
    if request.tools and request.tool_choice != "none" and not model.template.uses_variable("tools"):
        raise InvalidRequest("This model's chat template does not support `tools`.", param="tools")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if not model.template.uses_variable("reasoning_effort"):
            raise InvalidRequest(
                "This model's chat template does not support `reasoning_effort`.", param="reasoning_effort"
            )
        variables["reasoning_effort"] = request.reasoning_effort
    if request.documents:
        if not model.template.uses_variable("documents"):
            raise InvalidRequest("This model's chat template does not support `documents`.", param="documents")
        variables["documents"] = request.documents
    text = render_chat(
        model,
        request.messages,
        request.tools,
        variables,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
    )
    if request.add_special_tokens:
        token_ids = model.codec.encode(text, add_special_tokens=True)
    else:
        token_ids = model.codec.encode_chat(text, request.cache_salt or "")
    truncate = prompt_truncator(model, request, model.max_model_len - (request.limit or 1), "left")
    if images:
        if truncate:
            raise InvalidRequest("Prompts with images cannot be truncated.", param="truncate_prompt_tokens")
        return ChatPrompt(text, *with_image_tokens(token_ids, images))
    return ChatPrompt(text, truncate(token_ids) if truncate else token_ids)


def with_image_tokens(token_ids: Sequence[int], images: Sequence[EncoderImage]) -> tuple[list[int], PromptImages]:
    """Repeats the token that stands for an image as often as the image has tokens. Also returns where the images are.

    Raises InvalidRequest unless the prompt has one such token for each image.
    """
    expanded: list[int] = []
    placed: list[tuple[EncoderImage, int]] = []
    remaining = iter(images)
    num_found = token_ids.count(image_token := images[0].token_id)
    if num_found != len(images):
        raise InvalidRequest(
            f"The chat template makes a prompt with {num_found} places for {len(images)} images. The text must not "
            "contain the token that stands for an image.",
            param="messages",
        )
    for token_id in token_ids:
        if token_id == image_token:
            placed.append((image := next(remaining), len(expanded)))
            expanded += [token_id] * (image.rows * image.columns)
        else:
            expanded.append(token_id)
    return expanded, PromptImages(placed)


def render_chat(
    model: ServedModel,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Renders messages with the model's chat template. Raises InvalidRequest if the template rejects them."""
    # The developer role is OpenAI's new name of the system role. Templates that do not mention it get the system role.
    keeps_developer = model.template.mentions("developer")
    plain = [_plain_message(message, model.template, keeps_developer) for message in messages]
    if continue_final_message:
        plain[-1]["content"] = _mark_end(plain[-1]["content"])
    offered = [{name: value for name, value in tool.items() if name != BREAKPOINT} for tool in tools or ()]
    try:
        text = model.template.render(plain, offered or None, variables, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise InvalidRequest(str(error), param="messages") from error
    return _cut_at_mark(text) if continue_final_message else text


def _mark_end(content: str | list[Json]) -> str | list[Json]:
    if isinstance(content, str):
        return content + _CONTINUE_HERE
    if "text" not in content[-1]:
        raise InvalidRequest("The final message ends with an image.", param="continue_final_message")
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_HERE}]


def _cut_at_mark(text: str) -> str:
    """Returns the text up to the end of the final message, so that the model continues this message."""
    message, mark, _ = text.rpartition(_CONTINUE_HERE)
    if not mark:
        raise InvalidRequest("The chat template does not render the final message.", param="continue_final_message")
    return message


def split_prompts(given: str | list[str | list[int] | int], param: str) -> list[Prompt]:
    """Returns a list of prompts from any of the four forms: a text, texts, token ids, or lists of token ids."""
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
    raise InvalidRequest(f"`{param}` cannot mix texts and token ids.", param=param)


def encode_prompts(
    model: ServedModel,
    prompts: list[Prompt],
    param: str,
    *,
    add_special_tokens: bool = True,
    truncate: PromptTruncator | None = None,
) -> list[list[int]]:
    """Encodes prompts. Raises InvalidRequest for an empty prompt or an unknown token id."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            token_ids = _encode(model.codec, prompt, add_special_tokens, truncate)
        else:
            token_ids = truncate(prompt) if truncate else prompt
        if not token_ids:
            raise InvalidRequest(f"`{param}` encodes to no tokens.", param=param)
        model.check_token_ids(token_ids, param)
        encoded.append(token_ids)
    return encoded


def _encode(codec: TextCodec, text: str, add_special_tokens: bool, truncate: PromptTruncator | None) -> list[int]:
    """Encodes a text. Truncation keeps the special tokens before and after the text."""
    token_ids = codec.encode(text, add_special_tokens=add_special_tokens)
    if truncate is None or len(token_ids) <= truncate.max_tokens:
        return token_ids
    plain = codec.encode(text, add_special_tokens=False)
    num_special = len(token_ids) - len(plain)
    # Special tokens can be on both sides, so search for the index at which the text's own tokens begin.
    before = next((i for i in range(num_special + 1) if token_ids[i : i + len(plain)] == plain), None)
    if before is None or num_special >= truncate.max_tokens:
        return truncate(token_ids)
    truncated = PromptTruncator(truncate.max_tokens - num_special, truncate.side)(plain)
    return [*token_ids[:before], *truncated, *token_ids[before + len(plain) :]]


def prompt_text(codec: TextCodec, prompt: Prompt) -> str:
    """Returns the prompt's text for `echo`, with special tokens."""
    return prompt if isinstance(prompt, str) else codec.decode(prompt, skip_special_tokens=False)


def _plain_message(message: Message, template: ChatTemplate, keeps_developer: bool) -> Json:
    role = "system" if message.role == "developer" and not keeps_developer else message.role
    plain: Json = {"role": role, "content": _plain_content(message.content, role, template)}
    if isinstance(message, AssistantMessage) and message.tool_calls and not message.content:
        plain["content"] = None if template.wants_null_content else ""
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        plain |= _assistant_extras(message, template)
    return plain


def _plain_content(content: Content | TextContent | None, role: str, template: ChatTemplate) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if any(isinstance(part, ImagePart) for part in content or ()):
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
            for part in content or ()
        ]
    texts = [part.text for part in content or () if isinstance(part, TextPart)]
    if len(texts) > 1 and template.accepts_parts(role):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)  # vLLM does the same for templates that expect a string


def _assistant_extras(message: AssistantMessage, template: ChatTemplate) -> Json:
    extras: Json = {}
    if message.tool_calls:
        extras["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    # Most templates print arguments with `tojson`, which would quote a string twice.
                    "arguments": (
                        call.function.arguments if template.wants_argument_text else _arguments(call.function.arguments)
                    ),
                },
            }
            for call in message.tool_calls
        ]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        extras |= {"reasoning_content": reasoning, "thinking": reasoning}  # the two names that templates read
    return extras


def _arguments(text: str) -> Json:
    """Parses a tool call's arguments. Invalid JSON becomes `{}`, because an error would block the conversation."""
    try:
        return msgspec.json.decode(text or "{}", type=Json)
    except msgspec.DecodeError:
        return {}
