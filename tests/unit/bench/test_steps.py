"""Measuring steps, on tiny shapes: every drafter, both kinds of acceptance, and what must be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.bench import step_report
from paceline.bench.step_batch import Batch
from paceline.bench.step_cases import Case, Spec, parse_spec
from paceline.bench.steps import Bench, Settings, _timed, random_network, run
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.errors import ConfigError, MemoryBudgetError, ModelError, PacelineError
from paceline.cost.hardware import Hardware
from paceline.engine import build
from paceline.engine.engine import Engine
from tests import tiny, tiny_drafters
from tests.engine.as_on_gpu import as_on_gpu

CEILINGS = Hardware(name="x", read_bandwidth=1e12, matmul_rate=1e14)
CASES = [Case(sequences=2, context=20), Case(sequences=3, context=37)]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `drafter` with a config.json each, and nothing else."""
    base = tmp_path_factory.mktemp("shapes")
    whole = tiny.write_tiny(base / "whole", "qwen3", max_position_embeddings=512)
    config = json.loads((whole / "config.json").read_text())
    for name, values in (
        ("target", config),
        ("drafter", tiny_drafters.dflash_config(config)),
    ):
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(values))
    return base


@pytest.fixture(scope="module")
def bench(shapes: Path) -> Bench:
    config = EngineConfig(
        model=str(shapes / "target"),
        device="cpu",
        dtype="float32",
        weights="bf16",
        threads=1,
        cache=CacheConfig(page_size=4, chunk_size=64),
    )
    return Bench(config, random_weights=0)


def spec_of(shapes: Path, method: str) -> Spec:
    names = {"none": "none", "dflash": "dflash:{}", "ddtree": "ddtree:{}:6"}
    return parse_spec(names[method].format(shapes / "drafter"))


@pytest.mark.parametrize("method", ["none", "dflash", "ddtree"])
def test_every_drafter_is_measured(bench: Bench, shapes: Path, method: str) -> None:
    """As many repeats as asked for, every part of a step, and nothing but decode steps."""
    settings = Settings(steps=3, repeats=2, warmup=1, stage_steps=2)
    told = []
    found = run(bench, spec_of(shapes, method), CASES, settings, lambda: told.append(1))
    assert [m.case for m in found] == CASES
    assert len(told) == 4
    for measured in found:
        assert len(measured.repeats) == 2
        assert all(seconds > 0 for seconds in measured.repeats)
        assert measured.accept_length >= 1.0
        parts = {"propose", "select", "verify", "walk", "commit"}
        assert set(measured.stages) == parts | ({"observe"} if method != "none" else set())
        assert measured.ungraphed is not None
        assert 0 < sum(measured.stages.values()) < measured.ungraphed


@pytest.mark.parametrize(
    "method,least,most", [("none", 1.0, 1.0), ("dflash", 2.4, 2.6), ("ddtree", 1.8, 2.6)]
)
def test_acceptance_can_be_said_beforehand(
    bench: Bench, shapes: Path, method: str, least: float, most: float
) -> None:
    """Through the whole engine: tokens are emitted, cached and counted as if they had been accepted.

    A tree may end before what was said is reached.
    """
    settings = Settings(steps=12, repeats=2, warmup=1, stage_steps=0, rates=(0.9, 0.4, 0.2))
    found = run(bench, spec_of(shapes, method), CASES, settings)
    assert all(least <= m.accept_length <= most for m in found)
    assert found[0].stages == {}


@pytest.mark.parametrize("method,mean", [("none", 1.0), ("dflash", 2.5)])
def test_steps_as_on_a_gpu(bench: Bench, shapes: Path, method: str, mean: float) -> None:
    """Padded rows, fixed places, results one step late, and the synthetic walk among them."""
    cases = [Case(sequences=n, context=20) for n in (1, 3, 5)]
    settings = Settings(steps=12, repeats=2, warmup=1, stage_steps=0, rates=(0.9, 0.4, 0.2))
    with bench.engine(spec_of(shapes, method), cases, settings) as engine:
        as_on_gpu(engine)
        found = [_timed(engine, case, settings) for case in cases]
        engine.check_integrity()
    assert [m.accept_length for m in found] == pytest.approx([mean] * 3, abs=0.15)
    assert all(m.without_graph == m.captured == 0 for m in found)


def test_an_engine_that_is_served_knows_no_synthetic_walk(bench: Bench, shapes: Path) -> None:
    """Real decoding cannot be switched to it by accident: it is passed in, once, where it was asked for."""
    from paceline.engine.build import build_parts
    from paceline.sample.verifier import verify

    settings = Settings(rates=(1.0,))
    spec = spec_of(shapes, "dflash")
    with bench.engine(spec, CASES, settings) as engine:
        assert engine._parts.walk is not verify
        config = engine.config
    with bench.engine(spec, CASES, Settings()) as engine:
        assert engine._parts.walk is verify
    plain = build_parts(replace(config, draft=DraftConfig(method="none")), bench.loaded, 0)
    assert plain.walk is verify


def test_prompts_are_computed_once_and_never_shared(bench: Bench, shapes: Path) -> None:
    """Two sequences over the same pages would read half of what is to be measured."""
    spec, case = spec_of(shapes, "none"), CASES[1]
    settings = Settings(steps=2, repeats=1, warmup=1, stage_steps=0)
    with bench.engine(spec, CASES, settings) as engine:
        batch = Batch(engine, case, settings.seed)
        batch.prefill()
        assert engine.counters.num_prefill_tokens == 3 * 37
        batch.start()
        again = engine.counters.num_prefill_tokens - 3 * 37
        assert 0 < again <= 3 * engine.config.cache.page_size
        held = [page for s in engine._scheduler.running for page in s.pages]
        assert len(held) == len(set(held))
        batch.stop()
        engine.check_integrity()


def test_a_batch_that_is_not_what_was_asked_for_is_refused(bench: Bench, shapes: Path) -> None:
    """A figure of fewer sequences, or of steps with prefill among them, would be a wrong one."""
    settings = Settings(steps=2, repeats=1, warmup=1, stage_steps=0)
    with bench.engine(spec_of(shapes, "none"), CASES, settings) as engine:
        batch = Batch(engine, CASES[0], settings.seed)
        batch.prefill()
        batch.start()
        engine.abort(batch._id(0))
        with pytest.raises(PacelineError, match=r"ended \(abort\)|decode steps of 2 sequences"):
            batch.steps(2)


def test_cases_that_memory_cannot_hold_are_refused_before_a_prompt_is_computed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the pages there are and those needed: a smaller pool would serve them one after the other."""
    monkeypatch.setattr(build, "free_memory", lambda _: 3_000_000)
    cases = [Case(sequences=1, context=30), Case(sequences=8, context=300)]
    with (
        pytest.raises(MemoryBudgetError) as raised,
        bench.engine(parse_spec("none"), cases, Settings()),
    ):
        pass
    said = str(raised.value)
    assert "8x300" in said
    assert "1x30" not in said
    assert "GB" in said
    assert "fewer sequences" in said


def test_a_record_says_it_all(bench: Bench, shapes: Path) -> None:
    """Figures, floors and ratios of every row, and what a reader needs to repeat them; it is JSON."""
    settings = Settings(steps=3, repeats=2, warmup=1, stage_steps=2)
    specs = [spec_of(shapes, m) for m in ("none", "dflash")]
    found = [(s, run(bench, s, CASES[:1], settings)) for s in specs]
    lines = step_report.lines(found, bench.loaded.config, CEILINGS, 4)
    made = step_report.record(
        lines,
        settings,
        bench.config,
        CEILINGS,
        model={"name": "tiny"},
        command=["paceline"],
        notes=["a"],
    )
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    plain, drafted = made["rows"]
    assert (plain["drafter"], plain["block"], plain["nodes"]) == ("none", None, 1)
    assert (drafted["drafter"], drafted["block"], drafted["nodes"]) == ("dflash", 4, 4)
    assert plain["over_plain"] == 1.0
    assert drafted["over_plain"] == pytest.approx(
        drafted["ms_per_step"] / plain["ms_per_step"], rel=0.01
    )
    assert 0 < plain["floor_ms"] < plain["ms_per_step"]
    assert plain["floor_ms"] < drafted["floor_ms"]
    assert {"machine", "versions", "commit", "ceilings", "settings", "conventions"} <= made.keys()
    assert step_report.table(lines).row_count == 2
    assert step_report.parts_table(lines).row_count == 2


@pytest.mark.parametrize(
    "text,message",
    [
        ("ngram", "unknown drafter 'ngram' to be measured"),
        ("dflash", "a drafter is none, or METHOD:CONFIG"),
        ("none:x", "unknown drafter 'none:x'"),
        ("dflash:nowhere", "qwen3-8b-dflash-b16, qwen3-8b-dflash-b8"),
        ("dflash:DRAFTER:5", "2 to 4 are possible"),
        ("ddtree:DRAFTER:1", "2 to 256 are possible"),
        ("ddtree:DRAFTER:x", "'x' in"),
        ("ddtree:DRAFTER:3:4", "unknown drafter"),
        ("chain", "chain:NODES or uneven:MEAN:MOST"),
        ("chain:4:16", "unknown drafter 'chain:4:16'"),
        ("chain:1", "2 to 256 are possible"),
        ("chain:257", "2 to 256 are possible"),
        ("uneven:4", "unknown drafter 'uneven:4'"),
        ("uneven:8:4", "no more on average than at most"),
        ("uneven:4:y", "'y' in"),
    ],
)
def test_mistakes_are_told(shapes: Path, text: str, message: str) -> None:
    """Before anything is loaded, with what is possible instead."""
    with pytest.raises(ConfigError, match=message):
        parse_spec(text.replace("DRAFTER", str(shapes / "drafter")))


def test_ratios_and_floors_of_trees_that_are_only_verified(bench: Bench) -> None:
    """Over plain decoding, and of uneven rows over even ones; the floor is the target's alone."""
    settings = Settings(steps=2, repeats=1, warmup=1, stage_steps=0)
    specs = [parse_spec(name) for name in ("none", "chain:4", "uneven:4:9", "chain:9")]
    found = [(s, run(bench, s, CASES[:1], settings)) for s in specs]
    made = step_report.lines(found, bench.loaded.config, CEILINGS, 4)
    plain, four, uneven, nine = (step_report._row(line) for line in made)
    assert (uneven["drafter"], uneven["spec"]) == ("uneven", "uneven:4:9")
    assert (uneven["block"], uneven["nodes"], uneven["most_nodes"]) == (None, 4, 9)
    assert uneven["over_even"] == pytest.approx(
        uneven["ms_per_step"] / four["ms_per_step"], rel=0.01
    )
    assert plain["over_even"] is four["over_even"] is None
    assert nine["over_plain"] == pytest.approx(nine["ms_per_step"] / plain["ms_per_step"], rel=0.01)
    floors = [line.floor.total for line in made]
    assert floors[0] < floors[1] == floors[2] < floors[3]
    assert made[2].floor.total == made[2].floor.target + made[2].floor.attention


def test_a_drafter_for_another_target_is_refused(bench: Bench, tmp_path: Path) -> None:
    """Random weights make no drafter fit a target that it was not made for."""
    with pytest.raises(ConfigError, match="does not belong to this target"):
        run(bench, parse_spec("dflash:qwen3-8b-dflash-b8"), CASES, Settings(steps=1))


@pytest.mark.parametrize("memory_gb", [None, 30.0])
def test_an_engine_is_built_around_a_network_that_is_in_no_file(
    bench: Bench, shapes: Path, memory_gb: float | None
) -> None:
    """As `Engine.build` does it, with a pool of the stated memory too."""
    spec = spec_of(shapes, "dflash")
    cache = replace(bench.config.cache, max_rows=2, memory_gb=memory_gb)
    config = replace(bench.config, cache=cache, draft=spec.draft)
    with pytest.raises(ModelError):
        Engine.build(config, loaded=bench.loaded)
    eng = Engine.build(config, loaded=bench.loaded, make_network=random_network(0))
    assert eng.spec.name == "dflash"
    batch = Batch(eng, Case(sequences=2, context=20), 0)
    batch.prefill()
    batch.start()
    batch.steps(2)


def test_weights_are_made_on_the_device_in_its_dtype(bench: Bench) -> None:
    """The model is never held twice, nor in another dtype."""
    assert bench.loaded.net.device == torch.device("cpu")
    assert bench.loaded.net.dtype is torch.float32
