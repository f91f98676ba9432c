"""Batch: sequences of random tokens in an engine, of which steps are timed.

Each prompt has a scope of its own, so that no two sequences share a page. All are prefilled once, through
the normal path; each start then finds them in the prefix cache, so that every repeat begins at the same
length and at once.
"""

from __future__ import annotations

import random
import time

from paceline.bench.step_cases import Case
from paceline.core.errors import PacelineError
from paceline.core.request import FinishReason, Request, SamplingParams, StepOutput
from paceline.engine.engine import Engine


class Batch:
    """The sequences of a case in an engine: prefilled once, started and stopped again and again.

    Args:
        engine: idle, with room for them.
        case: how many sequences of how many tokens.
        seed: of the prompts.
    """

    def __init__(self, engine: Engine, case: Case, seed: int) -> None:
        self._engine, self._case = engine, case
        draw = random.Random(f"{seed}/{case.context}")  # noqa: S311 (prompts, no secrets)
        vocabulary = engine.model_config.vocab_size
        self._prompts = [
            tuple(draw.randrange(vocabulary) for _ in range(case.context))
            for _ in range(case.sequences)
        ]
        self._room = engine.max_len - case.context
        self._turn = 0

    def prefill(self) -> None:
        """Cache all prompts, through the normal path; one token of each is made and forgotten.

        Raises:
            PacelineError: a sequence could not be served.
        """
        self._add(1)
        while self._engine.has_work:
            for output in self._engine.step():
                if output.finish_reason is not FinishReason.LENGTH:
                    self._refuse(output)

    def start(self) -> None:
        """Start all sequences again, and step until every one decodes."""
        missing = set(self._add(self._room))
        while missing:
            for output in self._engine.step():
                self._check(output)
                missing.discard(output.request_id)

    def steps(self, count: int) -> tuple[float, int]:
        """Run that many steps of all sequences: seconds, and tokens emitted.

        Raises:
            PacelineError: a sequence ended, or other steps ran than those.
        """
        counters, sequences = self._engine.counters, self._case.sequences
        before = counters.num_block_steps, counters.num_extend_steps, counters.num_emitted
        started = time.perf_counter()
        outputs = [self._engine.step() for _ in range(count)]
        seconds = time.perf_counter() - started
        for output in (o for step in outputs for o in step):
            self._check(output)
        blocks = counters.num_block_steps - before[0]
        extends = counters.num_extend_steps - before[1]
        each = {len(step) for step in outputs}
        if (blocks, extends) != (count, 0) or each - {sequences}:
            msg = (
                f"{blocks} decode and {extends} prefill steps ran where {count} decode steps of "
                f"{sequences} sequences were to be measured; this is a fault of the benchmark's, "
                "or the cache is too small: give it more memory or fewer sequences"
            )
            raise PacelineError(msg)
        return seconds, counters.num_emitted - before[2]

    def stop(self) -> None:
        """End all sequences."""
        for i in range(self._case.sequences):
            self._engine.abort(self._id(i))
        while self._engine.has_work:
            self._engine.step()

    def _add(self, max_tokens: int) -> list[str]:
        self._turn += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(self._prompts):
            scope = f"steps/{self._case.context}/{i}"
            self._engine.add(Request(id=self._id(i), prompt_ids=prompt, params=params, scope=scope))
        return [self._id(i) for i in range(self._case.sequences)]

    def _id(self, i: int) -> str:
        return f"{self._case.sequences}x{self._case.context}/{self._turn}/{i}"

    def _check(self, output: StepOutput) -> None:
        if output.finish_reason is not None:
            self._refuse(output)

    def _refuse(self, output: StepOutput) -> None:
        reason = None if output.finish_reason is None else output.finish_reason.value
        msg = (
            f"sequence {output.request_id} ended ({output.error or reason}) where steps were to be "
            "measured; with a real model give it shorter runs (--steps), or random weights"
        )
        raise PacelineError(msg)
