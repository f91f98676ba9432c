"""Request, SamplingParams and the reasons why a request ends. Token ids in, token ids out: no text.

Text enters through two small protocols: `Stopper` (stop strings) and `Grammar` (structured output),
implemented above the engine.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_DEVICE_STOP_IDS = 16
_INT64 = 1 << 63


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # end-of-text id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"
    ERROR = "error"


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
    repetition_penalty: float = 1.0  # > 0; over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # [-2, 2]; over output
    frequency_penalty: float = 0.0  # [-2, 2]; over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> [-100, 100]
    allowed_token_ids: Sequence[int] | None = None  # None: all
    banned_token_ids: Sequence[int] = ()
    min_tokens: int = 0  # no stop id before this many
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn when the request is added, and reported with the result
    n: int = 1  # independent samples of one prompt
    logprobs: int | None = None  # None: none; 0: the emitted token's; k: and the top k's
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    num_speculative_tokens: int | None = None  # cap for this request; 0 turns speculation off

    def __post_init__(self) -> None:
        """Refuse what is out of range, all problems at once."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        problems = [text for ok, text in self._rules() if not ok]
        if problems:
            msg = "invalid sampling parameters: " + "; ".join(problems)
            raise RequestError(msg)

    def _rules(self) -> list[tuple[bool, str]]:
        def within(x: float, low: float, high: float) -> bool:
            return math.isfinite(x) and low <= x <= high

        def whole(x: object, low: int) -> bool:
            return isinstance(x, int) and not isinstance(x, bool) and x >= low

        bias = self.logit_bias.values()
        return [
            (within(self.temperature, 0, 100), f"temperature {self.temperature} not in 0 ... 100"),
            (
                within(self.top_p, 0, 1) and self.top_p > 0,
                f"top_p {self.top_p} not in (0, 1]; use 1 to switch it off",
            ),
            (
                whole(self.top_k, -1),
                f"top_k {self.top_k} must be a whole number >= -1; 0 or -1 switch it off",
            ),
            (within(self.min_p, 0, 1), f"min_p {self.min_p} not in 0 ... 1"),
            (
                within(self.repetition_penalty, 0, math.inf) and self.repetition_penalty > 0,
                f"repetition_penalty {self.repetition_penalty} must be finite and > 0",
            ),
            (
                within(self.presence_penalty, -2, 2),
                f"presence_penalty {self.presence_penalty} not in -2 ... 2",
            ),
            (
                within(self.frequency_penalty, -2, 2),
                f"frequency_penalty {self.frequency_penalty} not in -2 ... 2",
            ),
            (all(within(b, -100, 100) for b in bias), "logit_bias values must be in -100 ... 100"),
            (
                len(self.logit_bias) <= 1024,
                f"logit_bias has {len(self.logit_bias)} entries; at most 1024 are possible",
            ),
            (
                self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
                "allowed_token_ids is empty, so nothing could be emitted; pass None for all",
            ),
            (whole(self.max_tokens, 1), f"max_tokens {self.max_tokens} must be >= 1"),
            (whole(self.min_tokens, 0), f"min_tokens {self.min_tokens} must be >= 0"),
            (
                not whole(self.max_tokens, 1)
                or not whole(self.min_tokens, 0)
                or self.min_tokens <= self.max_tokens,
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
            ),
            (
                all(self.stop),
                "stop must be non-empty strings; remove the empty one",
            ),
            (
                self.seed is None or (whole(self.seed, -_INT64) and self.seed < _INT64),
                f"seed {self.seed} must be a whole number that fits 64 bits",
            ),
            (whole(self.n, 1), f"n {self.n} must be >= 1"),
            (
                self.logprobs is None
                or (whole(self.logprobs, 0) and self.logprobs <= MAX_TOP_LOGPROBS),
                f"logprobs {self.logprobs} must be None or 0 ... {MAX_TOP_LOGPROBS}",
            ),
            (
                self.num_speculative_tokens is None or whole(self.num_speculative_tokens, 0),
                f"num_speculative_tokens {self.num_speculative_tokens} must be >= 0",
            ),
        ]


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
    """Constrains what may be emitted next; states are moved along a draft path and back."""

    def mask(self) -> Sequence[int]:
        """Return ceil(V / 32) words of allowed-token bits for the current state."""
        ...

    def advance(self, token_id: int) -> bool:
        """Move on by one token; False if the token is not allowed (the state stays)."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be continued.

    `sample_index` tells the n samples of one prompt apart: noise is keyed by it. `scope` separates
    tenants: prefix cache and suffix tree share nothing across scopes.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    sample_index: int = 0
    stop_ids: frozenset[int] = frozenset()  # resolved: end-of-text ids and stop_token_ids
    stopper: Stopper | None = None
    grammar: Grammar | None = None
    scope: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one emitted token under the unprocessed logits, and of the top k."""

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


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

    @property
    def accept_length(self) -> float:
        """Tokens emitted per verify pass, bonus included; 1.0 is the floor."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else 1.0


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
    stats: RequestStats | None = None  # with the finish
