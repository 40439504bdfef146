"""Incremental detokenization: releases text only when no later token can change it or take it back.

Two things are held back: the bytes of an incomplete character, and text that may be the beginning of a stop string.
The released text is always a prefix of the final text. It contains no stop string, and no part of one that ended it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

INVALID_PREFIX = "Invalid prefix encountered"
INCOMPLETE = "\ufffd"
CONTEXT_TOKENS = 8  # of the prompt, if the text continues one: enough for any character


class Detokenizer:
    """The text of one sequence. A stop string ends it.

    By default, the text includes neither the stop string nor special tokens. `min_tokens`: a stop string that ends
    within so many tokens is ordinary text. `prompt_token_ids`: of a prompt that the text continues. Without it,
    decoders made for SentencePiece remove the space before the first word.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop_string: bool = False,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self.stop_string: str | None = None  # the stop string that ended the text, if one has
        self.num_tokens = 0  # pushed until then
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._include_stop_string = include_stop_string
        self._min_tokens = min_tokens
        self._stream = DecodeStream(ids=self._context(prompt_token_ids), skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._max_held = max(map(len, self._stop), default=1) - 1
        self._held = ""  # text that may begin a stop string: at most _max_held characters
        self._undecoded: list[int] = []  # tokens since the last complete character

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens. Returns the newly released text, which is always empty once the text has stopped."""
        released = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            released += self._release(self._decode(token_id))
        return released

    def flush(self) -> str:
        """The rest of the text, when no more tokens follow. An incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        rest: str = self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skip_special_tokens)
        self._undecoded = []
        released = self._release(rest)
        if not self.stopped:
            released += self._held
            self._held = ""
        return released

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens; none if they are not text or end inside a character."""
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        text: str = self._tokenizer.decode(context, skip_special_tokens=self._skip_special_tokens)
        return context if text and not text.endswith(INCOMPLETE) else []

    def _decode(self, token_id: int) -> str:
        """The characters that this token completes."""
        self._undecoded.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises Exception itself
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Malformed bytes changed how earlier text decodes. That text has been released, so start again from here.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._undecoded = []
        return text

    def _release(self, new: str) -> str:
        """Looks for stop strings in the held text and the new text. Returns what can be released."""
        if not self._stop:
            return new
        text = self._held + new
        # The stop string that was completed first wins, however many characters arrived at once.
        if found := self._found(text) if self.num_tokens > self._min_tokens else []:
            end, at, self.stop_string = min(found)
            self._held = ""
            return text[: end if self._include_stop_string else at]
        num_held = next((n for n in range(min(self._max_held, len(text)), 0, -1) if self._may_stop(text[-n:])), 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _found(self, text: str) -> list[tuple[int, int, str]]:
        """(end, start, stop string) of each stop string in the text that ends after `_held`."""
        num_held = len(self._held)
        starts = [(text.find(stop, max(0, num_held + 1 - len(stop))), stop) for stop in self._stop]
        return [(at + len(stop), at, stop) for at, stop in starts if at >= 0]

    def _may_stop(self, ending: str) -> bool:
        """Whether a stop string begins with this."""
        return any(stop.startswith(ending) for stop in self._stop)
