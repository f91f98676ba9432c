"""Request, SamplingParams and the reasons why a request ends. Token ids in, token ids out: no text.

Text enters through two small protocols: `Stopper` (stop strings) and `Grammar` (structured output),
implemented above the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Protocol

from paceline.core.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_DEVICE_STOP_IDS = 16
MAX_BIAS = 1024
_INT64 = 1 << 63
_MOST_PENALTY = 1e6  # far beyond sense; much more leaves float32, where 0 * inf is no number


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
    repetition_penalty: float = 1.0  # [1e-6, 1e6]; over prompt and output (CTRL, arXiv 1909.05858)
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
        # Annotations bind nobody: values may come straight from JSON.
        bias: object = self.logit_bias
        only: object = self.allowed_token_ids
        stop: object = self.stop
        flags: Mapping[str, object] = {
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        rep = self.repetition_penalty
        return [
            *(
                (
                    _within(value, low, high),
                    f"{name} {value!r} not in {low} ... {high}; pass a number in that range",
                )
                for name, value, low, high in (
                    ("temperature", self.temperature, 0, 100),
                    ("min_p", self.min_p, 0, 1),
                    ("presence_penalty", self.presence_penalty, -2, 2),
                    ("frequency_penalty", self.frequency_penalty, -2, 2),
                )
            ),
            (
                _within(self.top_p, 0, 1) and self.top_p > 0,
                f"top_p {self.top_p!r} not in (0, 1]; use 1 to switch it off",
            ),
            (
                _whole(self.top_k, -1),
                f"top_k {self.top_k!r} must be a whole number >= -1; 0 or -1 switch it off",
            ),
            (
                _within(rep, 1e-6, _MOST_PENALTY),
                f"repetition_penalty {rep!r} must be a number > 0, in 1e-6 ... 1e6",
            ),
            (
                isinstance(bias, Mapping)
                and _are_ids(bias.keys())
                and all(_within(b, -100, 100) for b in bias.values()),
                "logit_bias must map token ids (whole numbers) to values in -100 ... 100",
            ),
            (
                not isinstance(bias, Mapping) or len(bias) <= MAX_BIAS,
                f"logit_bias has too many entries; at most {MAX_BIAS} are possible",
            ),
            *(
                (_are_ids(ids), f"{name} must be a list of token ids (whole numbers)")
                for name, ids in (
                    ("allowed_token_ids", () if only is None else only),
                    ("banned_token_ids", self.banned_token_ids),
                    ("stop_token_ids", self.stop_token_ids),
                )
            ),
            (
                not isinstance(only, Collection) or len(only) > 0,
                "allowed_token_ids is empty, so nothing could be emitted; pass None for all",
            ),
            *(
                (_whole(value, low), f"{name} {value!r} must be >= {low}, a whole number")
                for name, value, low in (
                    ("max_tokens", self.max_tokens, 1),
                    ("min_tokens", self.min_tokens, 0),
                    ("n", self.n, 1),
                    ("num_speculative_tokens", self.num_speculative_tokens, 0),
                )
                if not (name == "num_speculative_tokens" and value is None)
            ),
            (
                not _whole(self.max_tokens, 1)
                or not _whole(self.min_tokens, 0)
                or self.min_tokens <= self.max_tokens,
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
            ),
            (
                _are_texts(stop),
                "stop must be non-empty strings; remove what is empty or no string",
            ),
            (
                self.seed is None or _whole(self.seed, -_INT64),
                f"seed {self.seed!r} must be a whole number that fits 64 bits",
            ),
            (
                self.logprobs is None
                or (_whole(self.logprobs, 0) and self.logprobs <= MAX_TOP_LOGPROBS),
                f"logprobs {self.logprobs!r} must be None or 0 ... {MAX_TOP_LOGPROBS}",
            ),
            *(
                (isinstance(value, bool), f"{name} {value!r} must be true or false")
                for name, value in flags.items()
            ),
        ]


def _within(x: object, low: float, high: float) -> bool:
    """A number in a range; NaN is in none, and a truth value is no number."""
    if isinstance(x, bool) or not isinstance(x, int | float | Real):
        return False
    return bool(low <= x <= high)  # type: ignore[operator]  # Real declares no order with float


def _whole(x: object, low: int) -> bool:
    """A whole number that the 64-bit columns of the sampling table hold."""
    return isinstance(x, int) and not isinstance(x, bool) and low <= x < _INT64


def _are_texts(x: object) -> bool:
    """A collection of non-empty strings; one that can be walked over more than once."""
    if not isinstance(x, Collection) or isinstance(x, str | bytes | Mapping):
        return False
    return all(isinstance(text, str) and text for text in x)


def _are_ids(x: object) -> bool:
    if not isinstance(x, Collection) or isinstance(x, str | bytes | Mapping):
        return False
    return all(isinstance(i, Integral) and not isinstance(i, bool) for i in x)


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
