from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.bench.lossless import TOP_LOGPROBS, judge
from paceline.bench.lossless import record as lossless_record
from paceline.bench.report import SpecRun, record, table
from paceline.bench.run import Settings, Slice, Task, run
from paceline.bench.summary import differences, summarise
from paceline.bench.workload import plain
from paceline.core.errors import PacelineError
from paceline.core.request import Request
from tests.fake_engine import EOS, FakeEngine

TASKS = [
    Task(key="a/0", group="a", prompt_ids=(5, 6)),
    Task(key="b/1", group="b", prompt_ids=(7,)),
    Task(key="a/2", group="a", prompt_ids=(8, 9, 10)),
]
STOPS = frozenset({EOS})
SETTINGS = Settings(max_tokens=7, warmup=0)


def wrong_from_third(request: Request, seed: int) -> list[int]:
    """The baseline says 10, 11, 12, ...; the drafted way leaves it at the third token of one task."""
    plain_way = request.params.num_speculative_tokens == 0
    if plain_way or len(request.prompt_ids) != 1:
        return [10, 11, 12, 13, 14, 15, 16]
    return [10, 11, 99 % 97, 13, 14, 15, 16]


def test_both_ways_run_side_by_side_and_take_turns() -> None:
    """Each prompt runs both ways in a row, and the one that goes first changes."""
    engine = FakeEngine([10, 11, 12])
    slices = run(engine, TASKS, replace(SETTINGS, repeats=2), stop_ids=STOPS)
    order = [(s.tasks, s.repeat, s.way) for s in slices]
    assert [o[0] for o in order[:6]] == [(0,), (0,), (1,), (1,), (2,), (2,)]
    assert [o[2] for o in order[:4]] == ["baseline", "draft", "draft", "baseline"]
    assert len(order) == 2 * 2 * len(TASKS)
    for request in engine.added:
        assert (request.params.num_speculative_tokens == 0) == ("/baseline/" in request.id)
        assert request.stop_ids == STOPS


def test_no_drafter_sees_an_answer_beforehand() -> None:
    """Ways and repeats never share a scope: else a suffix tree would replay the baseline."""
    engine = FakeEngine([10, 11])
    run(engine, TASKS, replace(SETTINGS, repeats=2, warmup=2), stop_ids=STOPS)
    scopes = {r.scope: set() for r in engine.added}
    for request in engine.added:
        way, repeat = request.id.split("/")[1:3]
        scopes[request.scope].add((way, repeat))
    assert all(len(ways) == 1 for ways in scopes.values())
    assert len(scopes) == 2 * 3  # two repeats and the warm-up, both ways
    engine = FakeEngine([10, 11])
    run(engine, TASKS, replace(SETTINGS, history="none"), stop_ids=STOPS)
    assert len({r.scope for r in engine.added}) == 2 * len(TASKS)


def test_seeds_belong_to_prompts() -> None:
    """Both ways of a prompt, in every repeat, have one seed; prompts have different ones."""
    engine = FakeEngine([10, 11])
    run(engine, TASKS, replace(SETTINGS, seed=40, repeats=2), stop_ids=STOPS)
    seeds = {tuple(r.prompt_ids): set() for r in engine.added}
    for request in engine.added:
        seeds[tuple(request.prompt_ids)].add(request.params.seed)
    assert list(seeds.values()) == [{40}, {41}, {42}]


def test_warm_up_and_progress_count_right() -> None:
    """Warm-up answers are in no figure; progress ends at its total."""
    seen: list[tuple[int, int]] = []
    slices = run(
        FakeEngine([10, 11]),
        TASKS,
        replace(SETTINGS, warmup=2),
        stop_ids=STOPS,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert all(s.repeat == 0 for s in slices)
    assert seen[-1] == (6, 6)
    assert max(done for done, _ in seen) == 6


@pytest.mark.parametrize("concurrency", [2, 8])
def test_concurrent_requests_run_together(concurrency: int) -> None:
    """As many requests as asked for are in the engine at once, never more."""
    tasks = [replace(TASKS[0], key=str(i)) for i in range(9)]
    engine = FakeEngine([10, 11])
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        most = max(most, len(engine._open))

    engine._on_step = watch
    slices = run(engine, tasks, replace(SETTINGS, concurrency=concurrency), stop_ids=STOPS)
    assert most == min(concurrency, len(tasks))
    answered = sorted(i for s in slices if s.way == "draft" for i in s.tasks)
    assert answered == list(range(9))
    assert all([x.task for x in s.samples] == list(s.tasks) for s in slices)


def test_a_request_that_ends_early_stops_the_run() -> None:
    """A figure without all its answers would be wrong."""
    engine = FakeEngine([10, 11])
    engine._on_step = lambda _: engine.abort(engine.added[0].id)
    with pytest.raises(PacelineError, match="prompt a/0 ended early"):
        run(engine, TASKS, SETTINGS, stop_ids=STOPS)


def test_accept_length_is_emitted_tokens_per_step() -> None:
    """Seven tokens: one from prefill, six from two steps of three; token-weighted, bonus included."""
    slices = run(FakeEngine([10, 11, 12], width=3), TASKS, SETTINGS, stop_ids=STOPS)
    *groups, everything = summarise(slices, TASKS)
    assert [g.group for g in groups] == ["a", "b"]
    assert everything.group == "all"
    for group in (*groups, everything):
        assert group.accept_length == pytest.approx(6 / 2)
        assert group.accept_length_mean == pytest.approx(6 / 2)
        assert group.position_rates == pytest.approx((1.0, 1.0) + (0.0,) * 5)
        assert 1 + sum(group.position_rates) == pytest.approx(group.accept_length)
        assert group.accept_rate == 1.0
        assert group.drafts_per_step == 2.0
        assert group.num_equal == group.num_compared == group.num_prompts
    assert everything.num_tokens == 21
    assert everything.num_steps == 6


def test_pooled_and_mean_accept_length_differ() -> None:
    """Long answers weigh more in the pooled figure."""

    def script(request: Request, seed: int) -> list[int]:
        return [10, 11, EOS] if len(request.prompt_ids) == 1 else [10, 11, 12, 13, 14, 15, 16]

    slices = run(FakeEngine(script, width=3), TASKS, SETTINGS, stop_ids=STOPS)
    everything = summarise(slices, TASKS)[-1]
    assert everything.accept_length == pytest.approx((6 + 2 + 6) / (2 + 1 + 2))
    assert everything.accept_length_mean == pytest.approx((3 + 2 + 3) / 3)


def test_speeds_are_tokens_over_wall_time() -> None:
    """Speed ratios are per repeat, then their median; a mixed slice is shared by tokens."""
    slices = run(FakeEngine([10]), TASKS, replace(SETTINGS, repeats=3), stop_ids=STOPS)
    factor = {("draft", 0): 1.0, ("draft", 1): 2.0, ("draft", 2): 4.0}
    timed = [replace(s, seconds=factor.get((s.way, s.repeat), 4.0)) for s in slices]
    everything = summarise(timed, TASKS)[-1]
    assert everything.speed_ratio == 2.0
    assert everything.speed_ratio_range == (1.0, 4.0)
    assert everything.baseline_tokens_per_second == pytest.approx(7 / 4)
    mixed = Slice(
        tasks=(0, 1, 2),
        repeat=0,
        way="draft",
        seconds=6.0,
        samples=tuple(s.samples[0] for s in slices if s.way == "draft" and s.repeat == 0),
    )
    other = replace(
        mixed,
        way="baseline",
        seconds=12.0,
        samples=tuple(replace(s, way="baseline") for s in mixed.samples),
    )
    for group in summarise([mixed, other], TASKS):
        assert group.speed_ratio == pytest.approx(2.0)
        assert group.tokens_per_second == pytest.approx(21 / 6)


def test_differences_are_found_where_they_begin() -> None:
    """The first token that differs, in the right prompt, with both answers."""
    slices = run(FakeEngine(wrong_from_third), TASKS, SETTINGS, stop_ids=STOPS)
    (found,) = differences(slices)
    assert (found.task, found.repeat, found.index) == (1, 0, 2)
    assert found.baseline.token_ids[2] == 12
    groups = {g.group: g for g in summarise(slices, TASKS)}
    assert (groups["a"].num_equal, groups["b"].num_equal, groups["all"].num_equal) == (2, 0, 2)


def test_a_shorter_answer_differs_at_its_end() -> None:
    """An answer that only breaks off is a difference too."""

    def script(request: Request, seed: int) -> list[int]:
        full = [10, 11, 12, 13, 14, 15, 16]
        return full if request.params.num_speculative_tokens == 0 else [10, 11, 12, EOS]

    (found, *_) = differences(run(FakeEngine(script), TASKS, SETTINGS, stop_ids=STOPS))
    assert found.index == 3


def test_the_record_is_json_and_says_what_was_measured() -> None:
    """Source, machine, versions, prompts, config, figures and raw times; numbers only where measured."""
    slices = run(FakeEngine(wrong_from_third), TASKS, SETTINGS, stop_ids=STOPS)
    engine = FakeEngine([1])
    config = replace(engine.config, device="cpu")
    one = SpecRun(spec="fake", config=config, notes=("n",), tasks=TASKS, slices=slices)
    workload = plain(["x", "y", "z"])
    made = record([one], workload, SETTINGS, command=["paceline", "bench"], warnings=["w"])
    again = json.loads(json.dumps(made, allow_nan=False))
    assert again == made
    assert {"commit", "dirty", "versions", "machine", "config", "workload", "settings"} <= set(made)
    assert made["workload"]["digest"] == workload.digest
    (result,) = made["results"]
    assert result["num_different"] == 1
    assert result["differences"] == [{"prompt": "b/1", "repeat": 0, "first_token": 2}]
    assert [g["group"] for g in result["groups"]] == ["a", "b", "all"]
    assert len(result["raw"]) == 6
    assert result["draft"]["method"] == config.draft.method
    shown = table([one, one])
    assert shown.row_count == 3 + 3  # groups and all; speeds and equality
    assert next(iter(shown.columns[2].cells)).startswith("3.00  ")
    assert list(shown.columns[3].cells)[-1] == "2/3"


def test_lossless_shows_the_first_difference_with_its_gap() -> None:
    """Where outputs differ, the gap of the two best logits tells rounding from a fault."""
    slices = run(
        FakeEngine(wrong_from_third),
        TASKS,
        SETTINGS,
        stop_ids=STOPS,
        baseline_logprobs=TOP_LOGPROBS,
    )
    verdict = judge("fake", 0.0, TASKS, slices)
    assert not verdict.equal
    assert (verdict.num_equal, verdict.num_prompts, verdict.num_tokens) == (2, 3, 21)
    (first,) = verdict.differences
    assert (first.prompt, first.index) == ("b/1", 2)
    assert (first.baseline_token, first.draft_token) == (12, 2)
    assert first.logit_gap == pytest.approx(0.25)
    config = replace(FakeEngine([1]).config, device="cpu")
    made = lossless_record([verdict], plain(["x"]), SETTINGS, config, command=["paceline"])
    assert made["equal"] is False
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_lossless_holds_for_equal_answers() -> None:
    """Equal tokens make a verdict without differences, at whatever temperature."""
    slices = run(FakeEngine([10, 11]), TASKS, SETTINGS, stop_ids=STOPS, baseline_logprobs=2)
    verdict = judge("fake", 1.0, TASKS, slices)
    assert verdict.equal
    assert verdict.differences == ()
    assert verdict.accept_length == pytest.approx(3.0)
