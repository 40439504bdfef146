"""From tokens to text as it grows: nothing is released that a later token could still change or take back.

Two things are held back: bytes of a character that is not complete yet, and text that may be the beginning of a stop
string. What has been released is a prefix of the final text, and contains no stop string, nor part of one that came.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

INVALID_PREFIX = "Invalid prefix encountered"
INCOMPLETE = "\ufffd"
CONTEXT_TOKENS = 8  # of a prompt, behind which a text goes on: enough for any character


class Detokenizer:
    """One sequence's text. Stop strings end it. Unless asked for, they are no part of it, nor are special tokens.

    `min_tokens`: a stop string that ends within so many tokens is text like any other. `prompt_token_ids`: of a prompt
    whose text this one goes on with. Without it, decoders made for SentencePiece take the space off the first word.
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
        self.stop_string: str | None = None  # the one that came, if one did
        self.num_tokens = 0  # that were pushed until then
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._include_stop_string = include_stop_string
        self._min_tokens = min_tokens
        self._stream = DecodeStream(ids=self._context(prompt_token_ids), skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._max_held = max(map(len, self._stop), default=1) - 1
        self._held = ""  # text that may be the beginning of a stop string: at most _max_held characters
        self._undecoded: list[int] = []  # tokens since the last that completed a character

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now. Once stopped, tokens mean nothing and the text is empty."""
        released = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            released += self._release(self._decode(token_id))
        return released

    def flush(self) -> str:
        """The rest, when no more tokens come; what is left of an incomplete character reads U+FFFD."""
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
        """The prompt's last tokens, if they are text, and not in the middle of a character."""
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        text: str = self._tokenizer.decode(context, skip_special_tokens=self._skip_special_tokens)
        return context if text and not text.endswith(INCOMPLETE) else []

    def _decode(self, token_id: int) -> str:
        self._undecoded.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises Exception itself
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Malformed bytes made earlier text read differently. That text is out; go on from here.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._undecoded = []
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        # The stop string that was complete first wins, however many characters came at once.
        if found := self._found(text) if self.num_tokens > self._min_tokens else []:
            end, at, self.stop_string = min(found)
            self._held = ""
            return text[: end if self._include_stop_string else at]
        num_held = next((n for n in range(min(self._max_held, len(text)), 0, -1) if self._may_stop(text[-n:])), 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _found(self, text: str) -> list[tuple[int, int, str]]:
        """End, beginning and name of each stop string that has become complete: none that was so within `_held`."""
        num_held = len(self._held)
        places = [(text.find(stop, max(0, num_held + 1 - len(stop))), stop) for stop in self._stop]
        return [(at + len(stop), at, stop) for at, stop in places if at >= 0]

    def _may_stop(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stop)
