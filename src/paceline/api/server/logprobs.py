"""Log-probabilities of an answer's tokens in OpenAI's forms, chat's and completions'; a prompt's in vLLM's."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.api.server.errors import bad

if TYPE_CHECKING:
    from paceline.api.results import Alternative, TokenLogprob
    from paceline.api.server.protocol_chat import ChatRequest
    from paceline.api.server.protocol_completions import CompletionRequest
    from paceline.api.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no -Infinity; what OpenAI and vLLM write in its place


class TokenNames:
    """How tokens are called: by their text, or "token_id:7" where ids were asked for."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: TokenLogprob | Alternative) -> str:
        """One token's name; bytes that are no character of their own are shown as U+FFFD."""
        return f"token_id:{token.token_id}" if self._as_ids else token.token

    def of(self, token_id: int) -> str:
        """The same, of a token of which nothing else is known."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def data(self, token_id: int) -> bytes:
        """One token's bytes; joined over an answer they are its UTF-8 text."""
        return self._tokenizer.token_bytes(token_id)


def chat_logprobs(tokens: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of chat: an entry per token, with its alternatives."""
    return {
        "content": [
            {
                **_entry(token, names),
                "top_logprobs": [_entry(other, names) for other in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(token: TokenLogprob | Alternative, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token),
        "logprob": _finite(token.logprob),
        "bytes": list(names.data(token.token_id)),
    }


class Offsets:
    """Where tokens begin in an answer's text, in characters.

    A token that holds a part of a character begins where that character does.

    Args:
        start: characters before the answer: the prompt's, where it is echoed.
        hidden: ids that the text leaves out.
    """

    def __init__(self, start: int, hidden: frozenset[int]) -> None:
        self._at = start
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int, data: bytes) -> int:
        """Where the next token begins."""
        at = self._at
        if token_id not in self._hidden:
            self._at += len(self._decoder.decode(data))
        return at


class PlacedTokens:
    """Finds the tokens that parts of an answer's text came from, in order, for parts that leave text out.

    Args:
        names: how tokens are called.
    """

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        # Tokens whose text was not asked for; a token that was told lends its other bytes as None.
        self._open: list[tuple[TokenLogprob | None, bytes]] = []

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        """The answer's next tokens."""
        self._open += [(token, self._names.data(token.token_id)) for token in tokens]

    def take(self, text: str) -> list[dict[str, Any]]:
        """Entries, as chat has them, of the tokens of the next part of the text; none if it is not there."""
        data = text.encode("utf-8", "surrogatepass")
        there = b"".join(piece for _, piece in self._open)
        # Marks that the text leaves out come before it, and may hold a short part of it themselves.
        start = len(there) - len(data) if there.endswith(data) else there.find(data)
        if start < 0:
            return []
        end, at, told, taken = start + len(data), 0, [], 0
        rest: list[tuple[TokenLogprob | None, bytes]] = []
        for token, piece in self._open:
            if at >= end:
                break
            taken += 1
            at += len(piece)
            if token is not None and at > start:
                told.append(token)
            if at > end:
                rest = [(None, piece[end - at :])]
        self._open = [*rest, *self._open[taken:]]
        found: list[dict[str, Any]] = chat_logprobs(told, self._names)["content"]
        return found


def completion_logprobs(
    tokens: Iterable[TokenLogprob], names: TokenNames, offsets: Offsets, *, first: int | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of completions: four lists in step.

    The alternatives of a place hold the emitted token too, as OpenAI's do; of alternatives with one
    name the likeliest counts.

    Args:
        tokens: what is told.
        names: how tokens are called.
        offsets: where they begin.
        first: a token before them, a prompt's first: it has null for a log-probability.
    """
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    if first is not None:
        found["tokens"].append(names.of(first))
        found["token_logprobs"].append(None)
        found["top_logprobs"].append(None)
        found["text_offset"].append(offsets.take(first, names.data(first)))
    for token in tokens:
        name, logprob = names.name(token), _finite(token.logprob)
        found["tokens"].append(name)
        found["token_logprobs"].append(logprob)
        top: dict[str, float] = {}
        for other in token.top:
            top.setdefault(names.name(other), _finite(other.logprob))
        top.setdefault(name, logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(offsets.take(token.token_id, names.data(token.token_id)))
    return found


def check_prompt_logprobs(body: ChatRequest | CompletionRequest) -> None:
    """Refuse log-probabilities of the prompt in a stream.

    Raises:
        ApiError: 400.
    """
    if body.prompt_logprobs is not None and body.streams:
        msg = (
            "prompt_logprobs are asked of a stream, which does not tell them; whole answers do, and "
            "completions stream them with `echo` and `logprobs`; leave prompt_logprobs out, or `stream`"
        )
        raise bad(msg, "prompt_logprobs")


def prompt_logprobs(
    tokens: Iterable[TokenLogprob | None], num_top: int, names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs` as vLLM has them: per place, by token id, the prompt's token and the likeliest.

    Args:
        tokens: of a prompt, with their ranks; the first is None.
        num_top: alternatives of each that are told.
        names: how tokens are called.
    """
    return [None if token is None else _ranked(token, num_top, names) for token in tokens]


def _ranked(token: TokenLogprob, num_top: int, names: TokenNames) -> dict[str, dict[str, Any]]:
    ranked: list[tuple[TokenLogprob | Alternative, int | None]] = [(token, token.rank)]
    ranked += [(other, i + 1) for i, other in enumerate(token.top[:num_top])]
    found: dict[str, dict[str, Any]] = {}
    for one, rank in ranked:
        entry = {
            "logprob": _finite(one.logprob),
            "rank": rank,
            "decoded_token": names.name(one),
        }
        found.setdefault(str(one.token_id), entry)
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LEAST) if logprob == logprob else LEAST  # noqa: PLR0124 (NaN is not itself)
