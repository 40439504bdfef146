"""POST /tokenize and /detokenize: convert text or a chat to token ids, and token ids to text, in vLLM's API format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from backend.engine.image_encoder import EncoderImage
from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import InvalidRequest
from backend.server.messages import check_tools
from backend.server.prompts import render_chat, with_image_tokens
from backend.server.request_body import decode_body
from backend.server.requests import DetokenizeRequest, TokenizeRequest, check_final_message
from backend.server.responses import Json


class TokenizeEndpoint(Endpoint):
    """Encodes a prompt, or messages after applying the chat template."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, TokenizeRequest)
        check_tools(request.tools)
        self._components.check_model(request.model)
        salt = request.cache_salt
        images = await self._components.load_images(request.messages or (), salt)
        await exchange.respond(
            await self._components.prepare(salt, len(body), lambda: responses.encode(self._payload(request, images)))
        )

    def _payload(self, request: TokenizeRequest, images: Sequence[EncoderImage]) -> Json:
        tokens, codec = self._tokens(request, images), self._components.model.codec
        return {
            "count": len(tokens),
            "max_model_len": self._components.model.max_model_len,
            "tokens": tokens,
            "token_strs": [codec.token_piece(token) for token in tokens] if request.return_token_strs else None,
        }

    def _tokens(self, request: TokenizeRequest, images: Sequence[EncoderImage]) -> list[int]:
        codec = self._components.model.codec
        if request.prompt is not None and request.messages is None:
            return codec.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
        if request.messages and request.prompt is None:
            check_final_message(request.continue_final_message, request.add_generation_prompt)
            text = render_chat(
                self._components.model,
                request.messages,
                request.tools,
                request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
            )
            tokens = codec.encode(text, add_special_tokens=bool(request.add_special_tokens))
            return with_image_tokens(tokens, images)[0] if images else tokens
        raise InvalidRequest("Exactly one of `prompt` and `messages` is required.", param="prompt")


class DetokenizeEndpoint(Endpoint):
    """Decodes token ids to text, including special tokens."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, DetokenizeRequest)
        self._components.check_model(request.model)
        await exchange.respond(
            await self._components.prepare(
                request.cache_salt, len(body), lambda: responses.encode({"prompt": self._text(request)})
            )
        )

    def _text(self, request: DetokenizeRequest) -> str:
        model = self._components.model
        model.check_token_ids(request.tokens, "tokens")
        return model.codec.decode(request.tokens, skip_special_tokens=False)
