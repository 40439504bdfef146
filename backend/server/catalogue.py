"""The small doors: what is served, whether it is well, its metrics, and its tokenizer."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from backend import __version__
from backend.server import metrics, replies
from backend.server.asgi import Door, Exchange
from backend.server.decoding import decode
from backend.server.errors import InvalidRequest, ModelNotFound, RequestNotFound
from backend.server.messages import check_tools
from backend.server.prompts import render_chat
from backend.server.replies import Json, usage_object
from backend.server.requests import DetokenizeRequest, TokenizeRequest, check_final_message
from backend.server.serving import Serving

JSON = "application/json"


class Catalogue:
    """The doors without a body."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name != self._serving.model.name:
            raise ModelNotFound(f"The model `{name}` does not exist.", param="model")
        return _json(self._model())

    async def request(self, request: Request) -> Response:
        """What a request that has ended consumed."""
        request_id = request.path_params["id"]
        usage = self._serving.records.get(request_id)
        if usage is None:
            raise RequestNotFound(f"There is no record of `{request_id}`: it runs still, is long gone, or never was.")
        return _json({"id": request_id, "object": "request", "usage": usage_object(usage)})

    async def health(self, request: Request) -> Response:
        engine = self._serving.engine
        if engine.healthy:
            return _json({"status": "ok"})
        reason = "a step does not come to its end" if engine.stalled else engine.error or "the engine is not running"
        return _json({"status": "error", "reason": reason}, status=503)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self._serving.metrics.render(), media_type=metrics.CONTENT_TYPE)

    def _model(self) -> Json:
        model = self._serving.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "warmpath",
            "root": model.root,
            "max_model_len": model.max_model_len,
        }


class Tokenize(Door):
    """POST /tokenize, as at vLLM: a prompt, or messages by the chat template, to token ids."""

    def __init__(self, serving: Serving, closing: asyncio.Future[None]) -> None:
        self._serving = serving
        self.closing = closing

    async def answer(self, exchange: Exchange, body: bytes) -> None:
        request = decode(body, TokenizeRequest)
        check_tools(request.tools)
        self._serving.check_model(request.model)
        tokens = await self._serving.prepare(len(body), lambda: self._tokens(request))
        codec = self._serving.model.codec
        reply = {
            "count": len(tokens),
            "max_model_len": self._serving.model.max_model_len,
            "tokens": tokens,
            "token_strs": [codec.token_piece(token) for token in tokens] if request.return_token_strs else None,
        }
        await exchange.reply(replies.encode(reply))

    def _tokens(self, request: TokenizeRequest) -> list[int]:
        codec = self._serving.model.codec
        if request.prompt is not None and request.messages is None:
            return codec.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
        if request.messages and request.prompt is None:
            check_final_message(request.continue_final_message, request.add_generation_prompt)
            text = render_chat(
                self._serving.model,
                request.messages,
                request.tools,
                request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
            )
            return codec.encode(text, add_special_tokens=bool(request.add_special_tokens))
        raise InvalidRequest("Give one of `prompt` and `messages`.", param="prompt")


class Detokenize(Door):
    """POST /detokenize: token ids to text, special tokens shown."""

    def __init__(self, serving: Serving, closing: asyncio.Future[None]) -> None:
        self._serving = serving
        self.closing = closing

    async def answer(self, exchange: Exchange, body: bytes) -> None:
        request = decode(body, DetokenizeRequest)
        model = self._serving.model
        self._serving.check_model(request.model)
        model.check_token_ids(request.tokens, "tokens")
        text = await self._serving.prepare(
            len(body), lambda: model.codec.decode(request.tokens, skip_special_tokens=False)
        )
        await exchange.reply(replies.encode({"prompt": text}))


def _json(payload: Json, status: int = 200) -> Response:
    return Response(replies.encode(payload), status_code=status, media_type=JSON)
