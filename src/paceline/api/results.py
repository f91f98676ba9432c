"""What generation returns: `Result` for a finished answer, `Chunk` for a piece of one in the making.

Frozen facts without behaviour; completion.py makes them. Not for: the wire formats of a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Fault, RequestStats, VerifiedTree

_MOST_TREES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A token that could have stood in a place, and its log-probability."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model's unprocessed logits.

    `top` holds the most likely tokens of that place, best first, as many as were asked for. `rank` is told
    of a prompt's tokens: how many tokens are likelier, plus 1.
    """

    token_id: int
    token: str
    logprob: float
    top: Sequence[Alternative] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one step added to an answer.

    `text` may be empty (a character or a possible stop string is not complete) and is never taken
    back. `sources` says per token which drafter proposed it; 0 is the model itself. `trees` are those of
    the steps that are in this chunk, if the request shows trees; their `start` says which tokens are whose.
    """

    prompt_index: int  # which of the prompts given
    sample_index: int
    text: str
    token_ids: Sequence[int]
    sources: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None
    finish_reason: str | None = None  # with the last chunk
    result: Result | None = None  # the whole answer, with the last chunk
    trees: Sequence[VerifiedTree] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] | None = (
        None  # with the first chunk, if asked for
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished answer.

    `token_ids` includes the end-of-text or stop token that ended it; `text` does not, unless
    `include_stop_str_in_output` was set.
    """

    prompt_index: int  # which of the prompts given
    sample_index: int  # which of its n samples
    prompt_ids: Sequence[int]
    text: str
    token_ids: Sequence[int]
    finish_reason: str  # stop, length, abort, error
    stop_reason: int | str | None  # the stop string or stop_token_ids member; None: end of text
    logprobs: Sequence[TokenLogprob] | None
    sources: Sequence[int]  # per token: which drafter proposed it; 0: the model itself
    stats: RequestStats
    error: str | None = None  # with finish_reason "error"
    fault: Fault | None = None  # the same
    prompt_logprobs: Sequence[TokenLogprob | None] | None = (
        None  # [prompt], if asked for; first: None
    )

    @property
    def seed(self) -> int:
        """The seed that repeats these tokens."""
        return self.stats.seed

    @property
    def accept_length(self) -> float:
        """Tokens emitted per verify step, the bonus token included; 1.0 without speculation."""
        return self.stats.accept_length

    @property
    def accept_histogram(self) -> Sequence[int]:
        """Index j: verify steps that accepted exactly j draft tokens."""
        return self.stats.accept_histogram

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over prefill and decoding time; waiting for a row is left out."""
        seconds = self.stats.prefill_s + self.stats.decode_s
        return len(self.token_ids) / seconds if seconds > 0 else 0.0


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk that says what several of one answer say, given in order; at least one.

    Of trees only the newest are kept: they are there to be looked at, not to pile up.
    """
    first, last = chunks[0], chunks[-1]
    if first is last:
        return first
    logprobs = None
    if first.logprobs is not None:
        logprobs = tuple(p for chunk in chunks for p in chunk.logprobs or ())
    return Chunk(
        prompt_index=first.prompt_index,
        sample_index=first.sample_index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        sources=tuple(i for chunk in chunks for i in chunk.sources),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        result=last.result,
        trees=tuple(tree for chunk in chunks for tree in chunk.trees)[-_MOST_TREES:],
        prompt_logprobs=first.prompt_logprobs,
    )
