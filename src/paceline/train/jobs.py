"""Which answer comes next: an endless list of jobs, each a pure function of its number.

So a stopped run goes on with the numbers that are not done, whatever order they finished in. Jobs of
prompts from files and of the target's own prompts alternate by their share from the first on, and so do
temperatures: any beginning of the list is a fair sample of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer to be made."""

    index: int
    prompt: int | None  # index of a prepared prompt; None: the target makes one first
    temperature: float
    seed: int


class JobList:
    """The jobs of a run.

    A prompt from a file is answered once in every pass over the files, by turns at each temperature,
    but at most once at temperature 0, where a second answer would be the first again.

    Args:
        num_prompts: prepared prompts; may be 0.
        temperatures: equal parts; one that stands twice gets two.
        own_share: share of jobs whose prompt the target makes.
        seed: of the order.
    """

    def __init__(
        self, num_prompts: int, temperatures: Sequence[float], own_share: float, seed: int
    ) -> None:
        self._num_prompts = num_prompts
        self._temperatures = tuple(temperatures)
        self._own_share = own_share if num_prompts else 1.0
        self._seed = seed

    def __iter__(self) -> Iterator[Job]:
        index = 0
        file_jobs = self._file_jobs()
        while True:
            # The n-th own job comes where index * share passes n.
            own = int((index + 1) * self._own_share) > int(index * self._own_share)
            if own:
                prompt, temperature = None, self._own_temperature(index)
            else:
                found = next(file_jobs, None)
                if found is None:
                    return
                prompt, temperature = found
            seed = _mix(self._seed, index)
            yield Job(index=index, prompt=prompt, temperature=temperature, seed=seed)
            index += 1

    def _own_temperature(self, index: int) -> float:
        return self._temperatures[_mix(self._seed, index, 1) % len(self._temperatures)]

    def _file_jobs(self) -> Iterator[tuple[int, float]]:
        """(prompt, temperature) pass after pass; ends where nothing new can be made."""
        number = 0
        while True:
            order = np.random.default_rng([self._seed, number]).permutation(self._num_prompts)
            fresh = False
            for prompt in order.tolist():
                temperature = self._file_temperature(prompt, number)
                if temperature is not None:
                    fresh = True
                    yield prompt, temperature
            if not fresh:
                return
            number += 1

    def _file_temperature(self, prompt: int, number: int) -> float | None:
        """A prompt's temperature in pass `number`; None: it has nothing new to give."""
        count = len(self._temperatures)
        first = _mix(self._seed, prompt, 2) % count
        turns = [self._temperatures[(first + i) % count] for i in range(count)]
        cold = turns.index(0.0) if 0.0 in turns else None
        warm = [(i, t) for i, t in enumerate(turns) if t > 0]
        # Of the zeros only the first is kept; later rounds are the warm ones alone.
        once = [t for i, t in enumerate(turns) if t > 0 or i == cold]
        if number < len(once):
            return once[number]
        return warm[(number - len(once)) % len(warm)][1] if warm else None


def _mix(*numbers: int) -> int:
    """A well mixed 63-bit number of small ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
