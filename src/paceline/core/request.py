"""Request, SamplingParams and the reasons why a request ends. Token ids in, token ids out: no text.

Text enters through two small protocols: `Stopper` (stop strings) and `Grammar` (structured output),
implemented above the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.errors import RequestError
from paceline.core.sampling_rules import problems_of


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # end-of-text id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"
    ERROR = "error"


class Fault(enum.Enum):
    """Whose doing it is that a request ended with an error."""

    REQUEST = (
        "request"  # its options and its grammar leave nothing, or its grammar cannot be followed
    )
    ENGINE = "engine"  # all else: a failed target, a stopper or a grammar with a bug


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names and ranges are those of the OpenAI API and of vLLM.

    At temperature 0 decoding is greedy. Options act on every verified node along its own path, in
    this order: allowed/banned tokens, min_tokens, logit_bias, penalties, temperature, min_p, top_k,
    top_p. Anything out of range raises `RequestError` at construction; nothing is ignored silently.
    """

    temperature: float = 1.0  # 0 ... 100
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # [1e-6, 1e6]; over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # [-2, 2]; over output
    frequency_penalty: float = 0.0  # [-2, 2]; over output
    # Token id -> [-100, 100]; at most 1,024 entries.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None  # None: all
    banned_token_ids: Sequence[int] = ()
    min_tokens: int = 0  # no stop id before this many
    max_tokens: int = 256
    stop: Sequence[str] = ()  # at most 256, of at most 1,024 characters
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn when the request is added, and reported with the result
    n: int = 1  # independent samples of one prompt; at most 128
    logprobs: int | None = (
        None  # None: none; 0: the emitted token's; k: and the top k's (20 at most)
    )
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    num_speculative_tokens: int | None = None  # cap for this request; 0 turns speculation off
    drafter: str | None = None  # of a merged drafter the only part that drafts; None: all of them

    def __post_init__(self) -> None:
        """Refuse what is out of range, all problems at once."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        problems = problems_of(self)
        if problems:
            msg = "invalid sampling parameters: " + "; ".join(problems)
            raise RequestError(msg)


class Stopper(Protocol):
    """Finds stop strings in what a request emits; knows text, so it lives above the engine."""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Take newly emitted tokens; return how many of them are kept if a stop string is found.

        Returns:
            None while no stop string is complete; else the number of these tokens up to and
            including the one that completes the first stop string. Called once per step.
        """
        ...


class Grammar(Protocol):
    """Constrains what may be emitted next; its state is moved along a draft path and back.

    One request's own, used by one thread at a time. V is the model's vocabulary. Whatever a method raises
    ends the request with an error; others go on. A `RequestError` says that the request asks for what
    cannot be followed, anything else that the implementation has failed. An implementation is drafter-invariant if the same
    tokens lead to the same state whatever was tried and taken back in between.
    """

    def mask(self) -> bytes:
        """Return ceil(V / 32) little-endian 32-bit words: bit t of them all is set if token t may follow."""
        ...

    def advance(self, token_id: int) -> bool:
        """Move on by one token; False if the token is not allowed (the state stays)."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens."""
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens that must come: the mask allows only the first, after it only the second, ...

        There may be more such tokens than are returned.
        """
        ...


class Constraint(Protocol):
    """What an answer must look like; shared by any number of requests and threads."""

    def start(self, *, ignore_eos: bool = False) -> Grammar:
        """A grammar in its first state, for one sample of one prompt.

        Args:
            ignore_eos: the text ends only where the constraint leaves nothing else.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be continued.

    `sample_index` tells the n samples of one prompt apart: noise is keyed by it. `scope` separates
    tenants: prefix cache and suffix tree share nothing across scopes. `shows_trees` asks for the trees
    of the steps beside their tokens, which are the same either way; `lists_steps` for the statistics of
    each step beside their sums. `prompt_logprobs` asks for the log-probabilities of the prompt's tokens, 0
    ... 20 alternatives with each; the prefix cache then saves nothing.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    sample_index: int = 0
    stop_ids: frozenset[int] = frozenset()  # resolved: end-of-text ids and stop_token_ids
    stopper: Stopper | None = None
    grammar: Grammar | None = None
    scope: str = ""
    shows_trees: bool = False
    lists_steps: bool = False
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one token under the unprocessed logits, and of the top k.

    `rank` is told of a prompt's tokens: how many tokens are likelier, plus 1.
    """

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Counters of one request; `accept_length` includes the bonus token (1 + accepted / steps)."""

    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_steps: int  # verify passes
    num_drafted: int  # draft nodes verified, roots excluded
    num_accepted: int  # draft nodes accepted
    accept_histogram: Sequence[int]  # index j: steps that accepted exactly j draft tokens
    num_preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float
    num_forced: int = 0  # accepted draft nodes that the request's grammar proposed
    num_drafts: int = 0  # verify passes with at least one draft node
    num_drafter_steps: int = 0  # of these, the ones with a node that the drafter proposed itself
    # One entry per verify pass, if the request lists its steps; else empty.
    drafted_per_step: Sequence[int] = ()
    accepted_per_step: Sequence[int] = ()
    drafter: str | None = None  # that the request named; "none" where it wanted no drafts

    @property
    def accept_length(self) -> float:
        """Tokens emitted per verify pass, bonus included; 1.0 is the floor."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTree:
    """What one step verified for one request, and how far the target went along it; to be looked at.

    N nodes, parents before children. Node 0 is the root: the newest token before the step. The tokens of
    `path[1:]` are the first that the step emitted; the target's own follows them, unless the request
    ended before it.
    """

    start: int  # output tokens emitted before the step
    token_ids: Sequence[int]  # [N]
    parents: Sequence[int]  # [N] -1 at the root
    sources: Sequence[int]  # [N] which drafter proposed the node; 0 at the root
    scores: Sequence[float]  # [N] log survival estimate of the path to the node; 0 at the root
    path: Sequence[int]  # accepted nodes from the root on, as far as their tokens were emitted
    emitted: Sequence[int]  # all tokens of the step, already cut at stops and limits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one engine step emitted for one request (already cut at stops and limits)."""

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    sources: Sequence[int] = ()  # per token: which drafter it came from; 0: the target's own
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop id that ended it, if one did
    error: str | None = None
    fault: Fault | None = None  # with an error
    stats: RequestStats | None = None  # with the finish
    # With the first token, if the request asks: [prompt]; of its first token nothing is known.
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    tree: VerifiedTree | None = None  # if the request shows trees, and the host knows this step's
