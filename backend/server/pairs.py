"""Encodes a query and a document as the one prompt that a model scores.

The form is, in this order: the model's own template for pairs, the prompt of Qwen3-Reranker, or the two texts as the
tokenizer joins a pair. A template for pairs is a chat template that names the roles "query" and "document", as
sentence-transformers and vLLM use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from backend.model_files.pooling import PoolingConfig
from backend.server.errors import ContextLengthError, InvalidRequest
from backend.server.requests import PairFields
from backend.server.templates import DEFAULT_NAME, ChatTemplate, TemplateError
from backend.server.tokenizer import TextCodec

_PAIR_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))

# The prompt of Qwen3-Reranker, from its model card. The answer is the next token, after an empty thought.
QWEN3_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_TURN = "<|im_start|>"


@dataclass(frozen=True, slots=True)
class PairEncoder:
    """Encodes pairs for one model. Thread-safe."""

    codec: TextCodec
    config: PoolingConfig
    max_model_len: int
    template: ChatTemplate | None  # for pairs

    def encode(self, query: str, document: str, fields: PairFields, param: str) -> list[int]:
        """Returns the prompt of a pair, with its document cut as `fields` ask for.

        `param` names the document in an error. Raises InvalidRequest, or ContextLengthError if the prompt is too long.
        """
        if fields.max_tokens_per_doc is not None:
            document = self.codec.first_tokens(document, fields.max_tokens_per_doc)
        token_ids = self._joined(query, document, fields)
        limit = fields.truncate_prompt_tokens
        if limit is not None:
            limit = self.max_model_len if limit == -1 else limit
            token_ids = self._cut(token_ids, query, document, fields, limit)
        if len(token_ids) > self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, but the query and `{param}` have "
                f"{len(token_ids)}.",
                param=param,
            )
        return token_ids

    def check(self, fields: PairFields) -> None:
        """Raises InvalidRequest if the fields ask for what this model's prompt does not have."""
        has_place = self.config.is_qwen3_reranker
        if self.template is not None:
            has_place = self.template.mentions("system") or self.template.uses_variable("instruction")
        if fields.instruction is not None and not has_place:
            raise InvalidRequest("This model's prompt has no `instruction`.", param="instruction")
        if fields.truncate_prompt_tokens is not None and not (
            fields.truncate_prompt_tokens == -1 or 0 < fields.truncate_prompt_tokens <= self.max_model_len
        ):
            raise InvalidRequest(
                f"`truncate_prompt_tokens` must be -1, or from 1 to {self.max_model_len}.",
                param="truncate_prompt_tokens",
            )

    def _cut(self, token_ids: list[int], query: str, document: str, fields: PairFields, limit: int) -> list[int]:
        """Removes tokens at the document's end until the prompt fits, or nothing of the document is left."""
        num_kept = len(self.codec.encode(document, add_special_tokens=False))
        while len(token_ids) > limit and num_kept > 0:
            num_kept = max(0, num_kept - (len(token_ids) - limit))
            token_ids = self._joined(query, self.codec.first_tokens(document, num_kept), fields)
        if len(token_ids) > limit:
            raise InvalidRequest(
                f"The query alone has more than the {limit} tokens of `truncate_prompt_tokens`.",
                param="truncate_prompt_tokens",
            )
        return token_ids

    def _joined(self, query: str, document: str, fields: PairFields) -> list[int]:
        if self.template is not None:
            text = _rendered(self.template, query, document, fields.instruction)
            return self.codec.encode(text, add_special_tokens=False)
        if self.config.is_qwen3_reranker:
            text = qwen3_prompt(query, document, fields.instruction)
            return self.codec.encode(text, add_special_tokens=False)
        if self.config.classifier and self.config.classifier.token_ids:  # a language model: no separator, as in vLLM
            return self.codec.encode(query + document, add_special_tokens=True)
        return self.codec.encode_pair(query, document)


def pair_template(sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Returns the first of a model's chat templates that is for pairs, or None."""
    for source in sources.values():
        if all(role.search(source) for role in _PAIR_ROLES):
            return ChatTemplate({DEFAULT_NAME: source}, special_tokens)
    return None


def qwen3_prompt(query: str, document: str, instruction: str | None) -> str:
    """Returns the prompt of Qwen3-Reranker. A query that a client of vLLM has written in this form is kept."""
    if query.startswith(_TURN):
        return query + document
    return (
        f"{_TURN}system\n{_QWEN3_SYSTEM}<|im_end|>\n{_TURN}user\n<Instruct>: {instruction or QWEN3_TASK}\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n{_TURN}assistant\n<think>\n\n</think>\n\n"
    )


def _rendered(template: ChatTemplate, query: str, document: str, instruction: str | None) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    try:
        return template.render(messages, variables={} if instruction is None else {"instruction": instruction})
    except TemplateError as error:
        raise InvalidRequest(str(error), param="query") from error
