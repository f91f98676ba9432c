"""Jobs: shares from the first on, no greedy answer twice, the same list every time."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from paceline.train.jobs import Job, JobList


def first(count: int, *, prompts: int = 10, share: float = 0.25, seed: int = 0) -> list[Job]:
    return list(islice(JobList(prompts, (0.0, 0.0, 0.7, 1.0), share, seed), count))


def test_jobs_are_numbered_and_repeatable() -> None:
    """A job is a function of its number; another seed gives other jobs."""
    jobs = first(80)
    assert [job.index for job in jobs] == list(range(80))
    assert jobs == first(80)
    assert jobs != first(80, seed=1)
    assert len({job.seed for job in jobs}) == 80


@pytest.mark.parametrize("count", [20, 200])
def test_any_beginning_has_the_share_of_own_prompts(count: int) -> None:
    """A run that stops early has both kinds."""
    own = sum(job.prompt is None for job in first(count))
    assert own == count // 4


def test_a_pass_answers_every_prompt_once_and_greedily_only_once_in_all() -> None:
    """Passes over the files: all prompts each time, temperature 0 never twice for one."""
    jobs = [job for job in first(400) if job.prompt is not None]
    for start in range(0, 100, 10):
        assert sorted(job.prompt for job in jobs[start : start + 10]) == list(range(10))
    greedy = Counter(job.prompt for job in jobs if job.temperature == 0)
    assert greedy == Counter(range(10))
    early = [job.temperature for job in first(4000, prompts=2000) if job.prompt is not None][:2000]
    assert 0.45 < sum(t == 0 for t in early) / 2000 < 0.55


def test_greedy_answers_alone_end_the_list() -> None:
    """With nothing but temperature 0, a prompt gives one answer."""
    jobs = list(JobList(5, (0.0,), 0.0, 0))
    assert sorted(job.prompt for job in jobs) == [0, 1, 2, 3, 4]


def test_without_files_all_prompts_are_the_targets_own() -> None:
    """Whatever the share says."""
    assert all(job.prompt is None for job in first(10, prompts=0, share=0.1))
