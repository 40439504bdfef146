"""The served model: its tokenizer, chat template, limits, sampling defaults and output formats."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend import parsers
from backend.engine.errors import RequestRefused
from backend.engine.grammar import GrammarCompiler
from backend.engine.sampling_params import SamplingParams
from backend.model_files import open_model_files
from backend.model_files.pooling import PoolingConfig, read_pooling
from backend.parsers.base import ToolFormat
from backend.parsers.reasoning import ReasoningFormat
from backend.server.errors import ContextLengthError, InvalidRequest
from backend.server.pairs import PairEncoder, pair_template
from backend.server.requests import GenerationRequest
from backend.server.templates import ChatTemplate
from backend.server.tokenizer import TextCodec, load_codec

# Fields of a checkpoint's generation_config.json that set the default of the request field of the same name.
NOTHING: Mapping[str, Any] = {}
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that the endpoints know about the loaded model. Immutable and shared by all endpoints."""

    name: str
    root: str  # the value of --model
    codec: TextCodec
    template: ChatTemplate
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]
    grammars: GrammarCompiler
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    pooling: PoolingConfig
    pairs: PairEncoder
    default_max_tokens: int | None = None  # for a chat without max_tokens; None: the rest of the context
    created: int = field(default_factory=lambda: int(time.time()))

    def check_context(
        self, num_prompt_tokens: int, max_tokens: int | None, prompt_field: str, limit_field: str = "max_tokens"
    ) -> int:
        """Returns the maximum number of tokens to generate.

        Raises ContextLengthError if the prompt and `max_tokens` exceed the model's context.
        """
        room = self.max_model_len - num_prompt_tokens
        # Do not reword the two messages: the gateway reads the numbers from them for Anthropic's clients
        # (gateway/endpoints/messages/context_overflow.py).
        if room < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt alone has "
                f"{num_prompt_tokens}.",
                param=prompt_field,
            )
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, but {num_prompt_tokens} in the "
                f"prompt and {max_tokens} to generate were asked for.",
                param=limit_field,
            )
        if max_tokens is not None:
            return max_tokens
        return room if self.default_max_tokens is None else min(room, self.default_max_tokens)

    def check_token_ids(self, token_ids: list[int], param: str) -> None:
        """Raises InvalidRequest if a token id is outside the vocabulary."""
        if token_ids and max(token_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"`{param}`: token id {max(token_ids)} is outside the vocabulary of {self.vocab_size}.", param=param
            )

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of each word, without and with a space before it. Omits equal sequences."""
        found: list[tuple[int, ...]] = []
        for i, word in enumerate(words):
            plain, spaced = (
                tuple(self.codec.encode(before + word.lstrip(), add_special_tokens=False)) for before in ("", " ")
            )
            if not plain:
                raise InvalidRequest(f"`bad_words[{i}]` encodes to no tokens.", param=f"bad_words[{i}]")
            found.append(plain)
            if spaced[-len(plain) :] != plain:
                found.append(spaced)
        self.check_token_ids([token_id for word in found for token_id in word], "bad_words")
        return tuple(found)

    def sampling(
        self,
        request: GenerationRequest,
        max_tokens: int,
        logprobs: int | None,
        choice: int,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Returns the sampling parameters of one choice. Raises InvalidRequest.

        `choice` is the choice's index within the request. The index is added to the seed, so that choices differ.
        """
        logit_bias = request.logit_bias or {}
        stop_token_ids = request.stop_token_ids or []
        self.check_token_ids(list(logit_bias), "logit_bias")
        self.check_token_ids(stop_token_ids, "stop_token_ids")

        def choose(name: str, neutral: float) -> float:
            value = getattr(request, name)
            return float(self.sampling_defaults.get(name, neutral) if value is None else value)

        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=choose("temperature", 1.0),
                top_p=choose("top_p", 1.0),
                top_k=max(0, int(choose("top_k", 0))),  # vLLM's -1 also means off
                min_p=choose("min_p", 0.0),
                presence_penalty=request.presence_penalty or 0.0,
                frequency_penalty=request.frequency_penalty or 0.0,
                repetition_penalty=choose("repetition_penalty", 1.0),
                logit_bias=logit_bias,
                bad_words=self._bad_words(request.bad_words or []),
                seed=None if request.seed is None else request.seed + choice,
                min_tokens=request.min_tokens or 0,
                stop_token_ids=frozenset(stop_token_ids) | (frozenset() if request.ignore_eos else self.eos_token_ids),
                logprobs=logprobs,
                prompt_logprobs=request.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
            )
        except RequestRefused as error:
            raise InvalidRequest(f"{error.message}.", param=error.param) from error


def load_model(
    model_dir: Path,
    name: str,
    root: str,
    max_model_len: int,
    *,
    tool_parser: str = parsers.AUTO,
    reasoning_parser: str = parsers.AUTO,
    hf_overrides: Mapping[str, Any] = NOTHING,
) -> ServedModel:
    """Reads the tokenizer, chat template and configuration of a model. The engine reads the weights.

    `tool_parser` and `reasoning_parser` are the name of a format, "auto" or "none". `hf_overrides` replace fields of
    config.json. Raises `ConfigError`,
    `UnsupportedModel` or `WeightsError` if a file cannot be read.
    """
    files = open_model_files(model_dir)
    config, generation = {**files.config(), **hf_overrides}, files.generation_config()
    text_config = {**config, **config.get("text_config", {})}
    codec = load_codec(files)
    template = ChatTemplate(files.chat_templates(), codec.special_tokens)
    pooling = read_pooling(files, hf_overrides)
    eos_token_ids = _eos_token_ids(text_config, generation, codec)
    vocab_size = int(text_config["vocab_size"])
    return ServedModel(
        name=name,
        root=root,
        codec=codec,
        template=template,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        hidden_size=int(text_config["hidden_size"]),
        eos_token_ids=eos_token_ids,
        sampling_defaults=_sampling_defaults(generation),
        grammars=GrammarCompiler(codec.tokenizer.to_str(), vocab_size, eos_token_ids),
        tool_format=parsers.tool_format(tool_parser, template.text),
        reasoning_format=parsers.reasoning_format(reasoning_parser, template.text),
        pooling=pooling,
        pairs=PairEncoder(codec, pooling, max_model_len, pair_template(files.chat_templates(), codec.special_tokens)),
        default_max_tokens=generation.get("max_new_tokens"),
    )


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Returns the sampling defaults of generation_config.json. `do_sample: false` means greedy decoding by default."""
    defaults = {key: float(generation[key]) for key in SAMPLING_DEFAULTS if generation.get(key) is not None}
    return defaults | {"temperature": 0.0} if generation.get("do_sample") is False else defaults


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], codec: TextCodec) -> frozenset[int]:
    """Returns all token ids that end an output, from both configuration files and the tokenizer's eos token."""
    ids: set[int] = set()
    for stored in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(stored if isinstance(stored, list) else [] if stored is None else [stored])
    eos = codec.special_tokens.get("eos_token")
    eos_id = codec.tokenizer.token_to_id(eos) if eos is not None else None
    return frozenset(ids | ({eos_id} if eos_id is not None else set()))
