"""Options and circumstances in combination: what single tests, one cause each, cannot see.

`test_drafters.py` changes one thing at a time. Here every option meets preemption, prefix hits, chunked
prefill and a mixed batch at once, on all architectures; and hypothesis draws the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import draft as drafters
from paceline.core.registry import Registry
from paceline.core.request import SamplingParams
from paceline.draft import DRAFTERS
from paceline.engine import build
from tests import tiny
from tests.conformance.test_drafters import OPTIONS, PROMPTS, TEMPERATURES, VARIANT_IDS, VARIANTS
from tests.conformance.test_drafters import params as params_of
from tests.engine import prophet
from tests.engine.harness import Outcome, engine, request, run

NAMES = [*(name for name in DRAFTERS if name != "none"), "prophet"]
EVERYBODY = [*VARIANTS, ("prophet", {})]
EVERYBODY_IDS = [*VARIANT_IDS, "prophet"]
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
Checkpoints = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _prophet_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry line for the tests' own drafter."""
    lines = {name: f"paceline.draft.{name}:{name.title()}Drafter" for name in DRAFTERS}
    registry = Registry("drafter", {**lines, "prophet": prophet.LINE})
    monkeypatch.setattr(drafters, "DRAFTERS", registry)
    monkeypatch.setattr(build, "DRAFTERS", registry)


Job = tuple[Sequence[int], SamplingParams]


def alone(folder: Path, job: Job) -> Outcome:
    """Plain decoding in an engine of its own."""
    return run(engine(folder, method="none", max_len=80), [request("ar", *job)])["ar"]


def told(outcome: Outcome) -> tuple[object, ...]:
    """What a user sees, log-probabilities apart."""
    last = outcome.last
    return outcome.tokens, last.finish_reason, last.stop_token_id, last.error


def compare(
    folder: Path,
    jobs: Mapping[str, Job],
    circumstances: dict[str, object],
    *,
    group: int = 4,
    plain: Mapping[str, Outcome] | None = None,
) -> dict[str, float]:
    """Run the jobs twice over in one engine, compare with plain decoding, return the counters.

    Args:
        folder: the target's.
        jobs: by name.
        circumstances: engine options.
        group: how many new jobs come before the same ones again.
        plain: what plain decoding gives for each job, where it is known.
    """
    eng = engine(folder, **{"max_len": 80, **circumstances})
    plain = plain or {name: alone(folder, job) for name, job in jobs.items()}
    if eng.spec.name == "prophet":
        answers = eng._proposer._drafter.answers
        answers |= {name: [*job[0], *plain[name].tokens] for name, job in jobs.items()}
    names = list(jobs)
    todo = [  # so few that their pages are still cached when they come again
        request(f"{name}#{repeat}", *jobs[name], scope=name)
        for start in range(0, len(names), group)
        for repeat in range(2)
        for name in names[start : start + group]
    ]
    hits = 0
    for key, found in run(eng, todo).items():
        expected = plain[key.rpartition("#")[0]]
        assert told(found) == told(expected), f"{key} differs from autoregressive"
        for name in ("logprob", "top_logprobs"):
            mine, theirs = (
                [getattr(lp, name) for out in one.outputs for lp in out.logprobs or ()]
                for one in (found, expected)
            )
            for a, b in zip(mine, theirs, strict=True):
                assert a == pytest.approx(b, abs=1e-8)
        assert found.last.stats is not None
        hits += found.last.stats.num_cached_tokens
    return {**eng.report(), "hits": hits}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name, draft", EVERYBODY, ids=EVERYBODY_IDS)
def test_every_option_under_every_circumstance(
    checkpoints: Checkpoints, name: str, draft: dict[str, object], option: str
) -> None:
    """Three temperatures in one batch, chunks of 5, too few pages, and every prompt asked twice."""
    at = list(OPTIONS).index(option) + EVERYBODY.index((name, draft))
    folder = checkpoints(ARCHITECTURES[at % len(ARCHITECTURES)])
    jobs = {
        f"{prompt}/{temperature}": (PROMPTS[prompt], params_of(option, temperature))
        for prompt in PROMPTS
        for temperature in TEMPERATURES
    }
    seen = compare(folder, jobs, {"method": name, "num_pages": 30, "chunk_size": 5, **draft})
    assert seen["num_preemptions"] > 0, "nobody was preempted: half a test"
    assert seen["hits"] > 0, "no prefix hit: half a test"
    assert seen["spec_decode_num_draft_tokens"] > 0, "nothing was drafted: no test at all"
    if name == "prophet":
        assert seen["spec_decode_num_accepted_tokens"] > 100, "hardly anything was accepted"


IDS = st.integers(3, 96)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "seed": st.integers(-5, 5)},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.4]),
        "top_k": st.sampled_from([-1, 0, 1, 4, 30, 500]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.2, 3.0]),
        "presence_penalty": st.sampled_from([-0.7, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.2, 0.0, 0.4]),
        "logit_bias": st.dictionaries(IDS, st.sampled_from([-100.0, -2.0, 1.5, 3.0]), max_size=4),
        "allowed_token_ids": st.lists(IDS, min_size=8, max_size=40),
        "banned_token_ids": st.lists(IDS, max_size=5),
        "stop_token_ids": st.lists(IDS, max_size=20),
        "min_tokens": st.just(1),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([0, 3]),
        "num_speculative_tokens": st.sampled_from([0, 1, 3]),
    },
)
PROMPT = st.builds(
    lambda base, times: (base * times)[:40],
    st.lists(IDS, min_size=1, max_size=7),
    st.integers(1, 9),
)
DRAFT = st.fixed_dictionaries(
    {"method": st.sampled_from(NAMES)},
    optional={
        "prompt_lookup_min": st.just(1),
        "suffix_shape": st.sampled_from(["tree", "path"]),
        "suffix_max_spec_factor": st.sampled_from([0.5, 1.0, 4.0]),
        "suffix_min_token_prob": st.sampled_from([0.0, 0.1, 0.5]),
        "suffix_max_cached_tokens": st.sampled_from([0, 20, 1000]),
        "num_speculative_tokens": st.sampled_from([1, 4, 12]),
        "adaptive": st.booleans(),
    },
)
CIRCUMSTANCES = st.fixed_dictionaries(
    {},
    optional={
        "chunk_size": st.sampled_from([1, 3, 8]),
        "num_pages": st.sampled_from([32, 40]),
        "page_size": st.sampled_from([3, 8]),
        "max_rows": st.sampled_from([1, 2, 8]),
        "prefix_cache": st.booleans(),
    },
)


def test_any_options_under_any_circumstances(checkpoints: Checkpoints) -> None:
    """Requests with options of all kinds at once equal plain decoding, whatever surrounds them."""
    seen: Counter[str] = Counter()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        variant=st.sampled_from(list(tiny.VARIANTS)),
        draft=DRAFT,
        circumstances=CIRCUMSTANCES,
        jobs=st.lists(st.tuples(PROMPT, SAMPLING), min_size=1, max_size=4),
    )
    def check(
        variant: str,
        draft: dict[str, object],
        circumstances: dict[str, object],
        jobs: list[tuple[list[int], dict[str, object]]],
    ) -> None:
        todo = {}
        for i, (prompt, values) in enumerate(jobs):
            few = "allowed_token_ids" in values  # then something must be left to emit
            others = {"banned_token_ids": (), "stop_token_ids": ()} if few else {}
            todo[str(i)] = prompt, SamplingParams(**{**values, **others})
        seen.update(compare(checkpoints(variant), todo, draft | circumstances))

    check()
    assert seen["spec_decode_num_draft_tokens"] > 0
    assert seen["spec_decode_num_accepted_tokens"] > 0, "nothing was ever accepted: half a test"
