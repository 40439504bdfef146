"""POST /v1/rerank, /v2/rerank and /score: how relevant documents are to a query, or texts to each other.

A model that scores reads each pair of texts as one prompt (`pairs.py`). An embedding model reads each text once, and
the score of a pair is the cosine of its two vectors. vLLM has both forms, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from backend.server import responses
from backend.server.asgi import Endpoint, HttpExchange
from backend.server.components import ServerComponents
from backend.server.errors import ContextLengthError, InvalidRequest
from backend.server.model import ServedModel
from backend.server.request_body import decode_body
from backend.server.requests import PairFields, RerankRequest, ScoreRequest
from backend.server.responses import Json
from backend.server.usage_records import TokenUsage
from backend.server.vectors import PooledRequest, cosine

Pair = tuple[int, int]  # indexes of a query and of a document


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else 1.0 - 1.0 / (1.0 + math.exp(logit))


def _same(logit: float) -> float:
    return logit


ACTIVATIONS: dict[str, Callable[[float], float]] = {"sigmoid": _sigmoid, "tanh": math.tanh, "identity": _same}


class _Scorer:
    """Scores the pairs of one request."""

    def __init__(
        self, components: ServerComponents, exchange: HttpExchange, operation: str, fields: PairFields
    ) -> None:
        """Raises InvalidRequest if the model cannot score pairs, or not as the fields ask for."""
        self._components = components
        self._exchange = exchange
        self._operation = operation
        self._fields = fields
        self._model = components.model
        self._adapter = components.check_model(fields.model)
        classifier = self._model.pooling.classifier
        if classifier is None and not self._model.pooling.embeds:
            raise InvalidRequest("This model neither scores pairs of texts nor is it for embeddings.", param="model")
        if classifier is not None and classifier.num_labels != 1:
            raise InvalidRequest(f"This model has {classifier.num_labels} labels and no score.", param="model")
        self._model.pairs.check(fields)
        if classifier is None and fields.instruction is not None:
            raise InvalidRequest("An embedding model's input has no `instruction`.", param="instruction")

    @property
    def model_name(self) -> str:
        return self._components.name_of(self._adapter)

    async def scores(
        self, size_bytes: int, queries: Sequence[str], documents: Sequence[str], pairs: Sequence[Pair], param: str
    ) -> tuple[list[float], TokenUsage]:
        """Returns the score of each pair, and the tokens of all prompts. `param` names the documents in errors."""
        model, components, fields = self._model, self._components, self._fields
        if model.pooling.classifier is None:
            return await self._cosines(size_bytes, queries, documents, pairs, param)
        prompts = await components.prepare(
            fields.cache_salt,
            size_bytes,
            lambda: [model.pairs.encode(queries[q], documents[d], fields, f"{param}[{d}]") for q, d in pairs],
        )
        pooled = PooledRequest(
            self._operation, model.pooling.pooling, fields.cache_salt, fields.priority, self._adapter
        )
        logits, usage = await pooled.run(components, self._exchange, prompts)
        activation = ACTIVATIONS[model.pooling.activation]
        return [activation(logit) for (logit,) in logits], usage

    async def _cosines(
        self, size_bytes: int, queries: Sequence[str], documents: Sequence[str], pairs: Sequence[Pair], param: str
    ) -> tuple[list[float], TokenUsage]:
        model, fields = self._model, self._fields
        prompts = await self._components.prepare(
            fields.cache_salt,
            size_bytes,
            lambda: [
                *(_text_ids(model, text, fields.truncate_prompt_tokens, None, "query") for text in queries),
                *(
                    _text_ids(model, text, fields.truncate_prompt_tokens, fields.max_tokens_per_doc, f"{param}[{i}]")
                    for i, text in enumerate(documents)
                ),
            ],
        )
        pooled = PooledRequest(
            self._operation, model.pooling.pooling, fields.cache_salt, fields.priority, self._adapter
        )
        vectors, usage = await pooled.run(self._components, self._exchange, prompts)
        return [cosine(vectors[q], vectors[len(queries) + d]) for q, d in pairs], usage


def _text_ids(model: ServedModel, text: str, limit: int | None, max_tokens: int | None, param: str) -> list[int]:
    """Encodes one text for an embedding model, and cuts it if it is asked for. Raises ContextLengthError."""
    if max_tokens is not None:
        text = model.codec.first_tokens(text, max_tokens)
    token_ids = model.codec.encode(text, add_special_tokens=True)
    if limit is not None:
        token_ids = token_ids[: model.max_model_len if limit == -1 else limit]
    if not token_ids:
        raise InvalidRequest(f"`{param}` has no tokens.", param=param)
    if len(token_ids) > model.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens, but `{param}` has {len(token_ids)}.",
            param=param,
        )
    return token_ids


class RerankEndpoint(Endpoint):
    """Serves reranks in the form of Jina's and vLLM's API, or in that of Cohere's second version."""

    def __init__(
        self, components: ServerComponents, closing: asyncio.Future[None], *, returns_documents: bool = True
    ) -> None:
        """`returns_documents` is the default for requests that do not say whether they want the documents' texts."""
        self._components = components
        self._returns_documents = returns_documents
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, RerankRequest)
        texts = [each if isinstance(each, str) else each.text for each in request.documents]
        scorer = _Scorer(self._components, exchange, "rerank", request)
        pairs = [(0, i) for i in range(len(texts))]
        scores, usage = await scorer.scores(len(body), [request.query], texts, pairs, "documents")
        ranked = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.top_n or None]
        wants_text = self._returns_documents if request.return_documents is None else request.return_documents
        results: list[Json] = [
            {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if wants_text else {})
            for i in ranked
        ]
        details = self._components.prompt_tokens_details
        payload = {
            "id": f"rerank-{exchange.request_id}",
            "object": "list",
            "model": scorer.model_name,
            "results": results,
            "usage": responses.prompt_usage_object(usage, prompt_tokens_details=details),
            "meta": {
                "tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
            },  # where Cohere's API has them
        }
        await exchange.respond(responses.encode(payload))


class ScoreEndpoint(Endpoint):
    """Serves scores of pairs in the form of vLLM's API."""

    def __init__(self, components: ServerComponents, closing: asyncio.Future[None]) -> None:
        self._components = components
        self.closing = closing

    async def handle(self, exchange: HttpExchange, body: bytes) -> None:
        request = decode_body(body, ScoreRequest)
        firsts, seconds = request.texts()
        scorer = _Scorer(self._components, exchange, "score", request)
        pairs = [(0 if len(firsts) == 1 else i, i) for i in range(len(seconds))]
        scores, usage = await scorer.scores(
            len(body), firsts, seconds, pairs, "text_2" if request.documents is None else "documents"
        )
        details = self._components.prompt_tokens_details
        payload = {
            "id": f"score-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": scorer.model_name,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": responses.prompt_usage_object(usage, prompt_tokens_details=details),
        }
        await exchange.respond(responses.encode(payload))
