"""The text of one answer while it is made: what may be shown now, and where a stop string ends it.

It takes accepted blocks of token ids and gives text. Two things are held back: bytes that are not yet a
whole UTF-8 character, and an end of the text that could become a stop string. What is shown is never
taken back, and nothing depends on how the tokens are cut into steps: every token is handled alone.

Worked example, stop string "END": the tokens " Th", "e E", "N", "X" show " Th", "e ", "", "ENX"; with
"D" instead of "X" the text ends with "The ", and `feed` says how many tokens of its step are kept.
Not for: end-of-text ids and limits, which the engine applies before tokens arrive here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from paceline.api.stop_strings import stop_strings
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import SamplingParams

logger = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
# Last prompt tokens that the decoder sees before the first output token: SentencePiece drops the space
# in front of a text, so a first token must not look like the beginning of one.
_CONTEXT_LEN = 6


class TextStream:
    """Collects the text of one request; implements `core.request.Stopper`.

    The stop string that is complete first, in text order, wins; of several that end at the same
    character, the longest. Only the output is searched: one that the prompt contains, or begins, does
    not stop it. A stop string that is a special token's text ("<|im_end|>") stops at that token, even
    where special tokens are not shown.

    Args:
        tokenizer: the model's.
        prompt_ids: the prompt, or its last tokens: context of the first output token, never shown.
        stop: non-empty stop strings.
        include_stop: the text ends after the stop string instead of before it.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: a stop string that is complete within this many tokens does not count.

    Attributes:
        stop_string: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._finished = False

        # Tokens to characters. `_anchor` were the last tokens whose text is complete, `_pending` came
        # after them, and `_num_peeked` characters of the pending tokens' text are already taken.
        anchor = list(prompt_ids[-_CONTEXT_LEN:])
        if self._decode(anchor).endswith(_REPLACEMENT):
            anchor = []  # a prompt cut inside a character: its bytes must not enter the output
        self._anchor = anchor
        self._pending: list[int] = []
        self._num_peeked = 0
        self._stream = DecodeStream(ids=anchor, skip_special_tokens=skip_special_tokens)

        # Characters to text. `_held` could become a stop string; its length is the state's depth.
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._state = 0
        self._held = ""
        self._text: list[str] = []
        self._num_taken = 0  # pieces of `_text` that `take` has handed out
        self._special_stops = self._special_tokens_among(stop) if skip_special_tokens else {}

    @classmethod
    def of_params(
        cls, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> TextStream:
        """The stream for one request, as its sampling parameters ask for it."""
        return cls(
            tokenizer,
            prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    @property
    def text(self) -> str:
        """All text that is safe to show, whether taken or not."""
        return "".join(self._text)

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Take the tokens of one step, in order.

        Returns:
            None while no stop string is complete; else how many of these tokens are kept, the one
            that completes it included. After that every call returns 0.
        """
        assert not self._finished, "feed() after finish(): the request has ended"
        if self.stop_string is not None:
            return 0
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            stop = self._special_stops.get(token_id)
            if stop is not None and self._num_tokens > self._min_tokens:
                self._release(self._held + self._rest() + (stop if self._include_stop else ""))
                self._end(stop)
                return index + 1
            if self._search(self._complete(token_id)):
                return index + 1
        return None

    def take(self) -> str:
        """Return the text that became safe to show since the last call."""
        pieces = self._text[self._num_taken :]
        self._num_taken = len(self._text)
        return "".join(pieces)

    def finish(self) -> str:
        """End the stream and return the text not yet taken, with everything that was held back.

        Bytes that never became a character are shown as U+FFFD. After a stop string nothing is left.
        """
        if self.stop_string is None and not self._finished:
            self._release(self._held + self._rest())
            self._held, self._pending = "", []
        self._finished = True
        return self.take()

    def _complete(self, token_id: int) -> str:
        """The characters that this token completes."""
        backend = self._tokenizer.backend
        try:
            piece = self._stream.step(backend, token_id)
        except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
            # Byte tokens of SentencePiece may change the text of tokens before them; what was shown
            # stays, and decoding goes on from here.
            logger.debug("the decoder started anew after %s", error)
            self._pending.append(token_id)
            piece = self._rest(peeked=0)
            self._pending.pop()
            self._stream = DecodeStream(
                ids=[*self._pending, token_id], skip_special_tokens=self._skip_special_tokens
            )
        if piece is None:
            self._pending.append(token_id)
            return self._peek() if self._stops is not None else ""
        fresh = piece[self._num_peeked :]
        self._anchor = [*self._pending, token_id]
        self._pending = []
        self._num_peeked = 0
        return fresh

    def _peek(self) -> str:
        """Characters of pending tokens before an unfinished one.

        `DecodeStream` holds a token back as a whole: " " and the first byte of a letter, say. A stop
        string must be found at the token that completes it, so the " " is looked at now.
        """
        fresh = self._rest().rstrip(_REPLACEMENT)
        self._num_peeked += len(fresh)
        return fresh

    def _rest(self, peeked: int | None = None) -> str:
        """Text of the pending tokens, after the characters already looked at."""
        if not self._pending:
            return ""
        start = len(self._decode(self._anchor)) + (self._num_peeked if peeked is None else peeked)
        return self._decode([*self._anchor, *self._pending])[start:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def _search(self, fresh: str) -> bool:
        """Move fresh characters to the text, up to what could become a stop string."""
        stops = self._stops
        if stops is None:
            self._release(fresh)
            return False
        seen = self._held + fresh
        for end, char in enumerate(fresh, start=len(self._held) + 1):
            self._state = stops.advance(self._state, char)
            length = stops.matched(self._state)
            if length and self._num_tokens > self._min_tokens:
                self._release(seen[: end if self._include_stop else end - length])
                self._end(seen[end - length : end])
                return True
        border = len(seen) - stops.depth(self._state)
        self._release(seen[:border])
        self._held = seen[border:]
        return False

    def _release(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _end(self, stop: str) -> None:
        self.stop_string = stop
        self._held, self._pending = "", []

    def _special_tokens_among(self, stop: Sequence[str]) -> dict[int, str]:
        ids = {string: self._tokenizer.backend.token_to_id(string) for string in stop}
        return {
            token_id: string
            for string, token_id in ids.items()
            if token_id is not None and token_id in self._tokenizer.special_ids
        }
