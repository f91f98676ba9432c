"""An engine without a model, for tests of what stands above engines; no tests here.

Its answer to a prompt is the script given, over and over; the drafted way emits several tokens a
step, the plain way one. It honours stop ids, stoppers, limits and aborts, as `Engine` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.config import EngineConfig, ModelConfig
from paceline.core.errors import RequestError
from paceline.core.request import (
    FinishReason,
    Request,
    RequestStats,
    StepOutput,
    TokenLogprobs,
)
from paceline.draft.base import DrafterSpec

EOS = 2
TIMEOUT = 120.0  # seconds that tests wait for what takes a tenth of them at most


class Gate:
    """Holds an engine's steps while it is closed: `on_step=gate`. It is made open."""

    def __init__(self) -> None:
        self._may_go, self._holds = threading.Event(), threading.Event()
        self._may_go.set()

    def __call__(self, _: int) -> None:
        if not self._may_go.is_set():
            self._holds.set()
            self._may_go.wait()  # without a limit: whoever made the gate opens it at the end

    def close(self) -> None:
        """The next step waits."""
        self._holds.clear()
        self._may_go.clear()

    def open(self) -> None:
        self._may_go.set()

    def wait_until_it_holds(self) -> None:
        """Return once a step waits, since the gate was closed."""
        assert self._holds.wait(TIMEOUT), "no step has come to the gate"


@dataclass
class _Open:
    request: Request
    seed: int
    emitted: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=lambda: [0] * 8)
    steps: list[int] = field(default_factory=list)  # drafted tokens of each, all of them accepted


class FakeEngine:
    """See the module's docstring.

    Args:
        script: the answer's tokens, or a function of the request and its seed that gives them.
        width: tokens per step with drafts.
        on_step: called at the beginning of each step with its number; may raise or wait.
    """

    def __init__(
        self,
        script: Sequence[int] | Callable[[Request, int], Sequence[int]],
        *,
        width: int = 3,
        max_len: int = 200,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.config = EngineConfig(threads=1)
        self.model_config = ModelConfig(
            architecture="llama",
            vocab_size=97,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            max_position=max_len,
            eos_token_ids=(EOS,),
        )
        self.spec = DrafterSpec(
            name="fake",
            max_nodes=width,
            max_depth=width - 1,
            on_host=True,
            sources={1: "own text", 2: "past outputs"},
        )
        self.notes = ("a note",)
        self.max_len = max_len
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.num_asked = 0  # how often `has_work` was looked at
        self.closed_by: list[threading.Thread] = []
        self._script = script
        self._width = width
        self._on_step = on_step
        self._open: dict[str, _Open] = {}
        self._seed = 1000

    @property
    def has_work(self) -> bool:
        self.num_asked += 1
        return bool(self._open or self.aborted_now)

    @property
    def aborted_now(self) -> list[str]:
        return [i for i, o in self._open.items() if i in self.aborted]

    def draw_seed(self) -> int:
        self._seed += 1
        return self._seed

    def add(self, request: Request) -> int:
        if not request.prompt_ids:
            msg = "the prompt is empty"
            raise RequestError(msg)
        if len(request.prompt_ids) >= self.max_len:
            msg = "the prompt is too long"
            raise RequestError(msg)
        seed = request.params.seed
        seed = self.draw_seed() if seed is None else seed
        self.added.append(request)
        self._open[request.id] = _Open(request, seed)
        return seed

    def abort(self, request_id: str) -> None:
        if request_id in self._open:
            self.aborted.append(request_id)

    def report(self) -> dict[str, float]:
        return {"num_steps": float(self.num_steps)}

    def close(self) -> None:
        self.closed_by.append(threading.current_thread())

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> list[StepOutput]:
        self.num_steps += 1
        meanwhile()
        self._on_step(self.num_steps)
        outputs = [self._end(i, (), FinishReason.ABORT) for i in self.aborted_now]
        return outputs + [self._advance(o) for o in list(self._open.values())]

    def _advance(self, one: _Open) -> StepOutput:
        request, params = one.request, one.request.params
        script = self._script(request, one.seed) if callable(self._script) else self._script
        start = len(one.emitted)
        drafts = self._width if params.num_speculative_tokens != 0 and start else 1
        tokens = [script[(start + i) % len(script)] for i in range(drafts)]
        tokens = tokens[: params.max_tokens - start]
        reason = stop_id = None
        for i, token in enumerate(tokens):
            if token in request.stop_ids:
                tokens, reason, stop_id = tokens[: i + 1], FinishReason.STOP, token
                break
        if request.stopper is not None:
            kept = request.stopper.feed(tokens)
            if kept is not None:
                stop_id = stop_id if kept == len(tokens) and stop_id else None
                tokens, reason = tokens[:kept], FinishReason.STOP
        if start:
            one.histogram[len(tokens) - 1] += 1
            one.steps.append(len(tokens) - 1)
        one.emitted += tokens
        if reason is None and len(one.emitted) >= params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return self._output(one, tokens)
        return self._end(request.id, tokens, reason, stop_id)

    def _end(
        self, request_id: str, tokens: Sequence[int], reason: FinishReason, stop: int | None = None
    ) -> StepOutput:
        one = self._open.pop(request_id)
        steps = sum(one.histogram)
        accepted = sum(j * n for j, n in enumerate(one.histogram))
        listed = tuple(one.steps) if one.request.lists_steps else ()
        stats = RequestStats(
            seed=one.seed,
            num_prompt_tokens=len(one.request.prompt_ids),
            num_cached_tokens=0,
            num_output_tokens=len(one.emitted),
            num_steps=steps,
            num_drafted=accepted,
            num_accepted=accepted,
            accept_histogram=tuple(one.histogram),
            num_preemptions=0,
            queue_s=0.0,
            prefill_s=0.5,
            decode_s=0.5,
            num_drafts=sum(count > 0 for count in one.steps),
            num_drafter_steps=sum(count > 0 for count in one.steps),
            drafted_per_step=listed,
            accepted_per_step=listed,
        )
        return self._output(one, tokens, reason=reason, stop=stop, stats=stats)

    @staticmethod
    def _output(
        one: _Open,
        tokens: Sequence[int],
        *,
        reason: FinishReason | None = None,
        stop: int | None = None,
        stats: RequestStats | None = None,
    ) -> StepOutput:
        wanted, of_prompt = one.request.params.logprobs, one.request.prompt_logprobs
        logprobs = None if wanted is None else _logprobs(tokens, wanted)
        told = None
        if of_prompt is not None and tokens and len(one.emitted) == len(tokens):
            scores = _logprobs(one.request.prompt_ids[1:], of_prompt)
            told = [None, *(replace(score, rank=3) for score in scores)]
        return StepOutput(
            request_id=one.request.id,
            token_ids=tuple(tokens),
            logprobs=logprobs,
            sources=(1,) * (len(tokens) - 1) + (0,) * bool(tokens),
            finish_reason=reason,
            stop_token_id=stop,
            stats=stats,
            prompt_logprobs=told,
        )


def _logprobs(tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            logprob=-0.5,
            top_ids=[(token + k) % 97 for k in range(num_top)],
            top_logprobs=[-0.5 - 0.25 * k for k in range(num_top)],
        )
        for token in tokens
    ]
