"""Graphs captured before requests ask for them: which, in what order, within which time and memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import CacheConfig, DraftConfig, EngineConfig, ModelConfig
from paceline.core.device import lacks_memory
from paceline.core.errors import MemoryBudgetError
from paceline.core.request import SamplingParams
from paceline.engine import engine as module
from paceline.engine.beforehand import capture_usual, set_aside, trial
from paceline.engine.build import Parts
from paceline.engine.engine import Engine
from paceline.engine.graph_keys import GraphKey, Ladder, Trees
from paceline.engine.graphs import GraphCache, Recorded, Step
from paceline.engine.launch import Launcher, graphs_of
from paceline.engine.memory import PoolSize, size_pool, warm_config
from paceline.sample.options import NOISE, TOP_K
from tests import tiny
from tests.engine.as_on_gpu import Called, as_on_gpu
from tests.engine.harness import engine, request, run

MB = 1 << 20
LADDER = Ladder(num_rows=6, max_nodes=12, grown_nodes=12, max_pages=500, page_size=16)
DRIVER = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=5)


class Sized:
    """A `Recorder` whose graphs take the memory of a device that has only so much; nothing is captured."""

    def __init__(
        self, nbytes: int = MB, room: int = 1 << 60, error: RuntimeError | None = None
    ) -> None:
        self.nbytes, self.room = nbytes, room
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        step()
        if self.room < self.nbytes:
            raise self.error
        self.room -= self.nbytes
        return Called(step, self.nbytes)


class Narrow(Sized):
    """A device with memory for steps of up to four tokens."""

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        tokens = step().emitted.shape[0]
        self.room = self.nbytes if tokens <= 4 else 0
        return super().record(step)


def made(eng: Engine, recorder: Sized) -> GraphCache:
    """An engine's graphs, with a recorder."""
    return as_on_gpu(eng, recorder)


# -- which -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trees", list(Trees))
def test_whatever_a_usual_step_has_is_on_the_ladder(trees: Trees) -> None:
    """All rows and drafts, contexts of up to 2,048 tokens, greedy or with a temperature."""
    usual = set(LADDER.usual([trees]))
    needed: set[GraphKey] = set()
    for rows, pages, options in itertools.product(range(1, 7), (1, 64, 65, 128), (0, NOISE)):
        most = rows * (LADDER.max_nodes - 1)
        for drafted in range(1, most + 1) if trees is Trees.GIVEN else (0,):
            needed.add(
                LADDER.key(
                    trees,
                    rows=rows,
                    drafted=drafted,
                    pages=pages,
                    options=options,
                    num_logprobs=-1,
                )
            )
    assert usual == needed
    other = {"trees": trees, "rows": 2, "drafted": 1, "pages": 1, "num_logprobs": -1}
    assert LADDER.key(**{**other, "options": NOISE | TOP_K}) not in usual
    assert LADDER.key(**{**other, "options": 0, "pages": 129}) not in usual


def test_the_largest_step_comes_first_and_short_contexts_before_long_ones() -> None:
    """So that the others find their memory in its, and a start that is cut short has the useful ones."""
    usual = LADDER.usual(Trees)
    assert len(usual) == len(set(usual))
    assert [k.pages for k in usual] == sorted(k.pages for k in usual)
    for _, some in itertools.groupby(usual, key=lambda k: k.pages):
        tokens = [k.tokens for k in some]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[0] == 6 * 12


@pytest.mark.parametrize(
    "max_pages, page_size, widths",
    [(20, 16, {20}), (100, 16, {64, 100}), (4000, 4, {64, 128, 256, 512})],
)
def test_widths_of_the_page_table(max_pages: int, page_size: int, widths: set[int]) -> None:
    """A row may have fewer pages than the least width, or than 2,048 tokens."""
    usual = replace(LADDER, max_pages=max_pages, page_size=page_size).usual([Trees.ROOT])
    assert {k.pages for k in usual} == widths


@pytest.mark.parametrize(
    "own, kinds",
    [
        ({"method": "none"}, {Trees.ROOT}),
        ({"method": "suffix"}, {Trees.ROOT, Trees.GIVEN}),
        ({"method": "suffix", "num_speculative_tokens": 0}, {Trees.ROOT}),
    ],
)
def test_usual_requests_ask_for_no_other_graph(
    model: Path, own: dict[str, Any], kinds: set[Trees]
) -> None:
    """What was captured beforehand is all that greedy and sampled requests ever launch."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=float(i % 2), seed=i)
        for i in range(5)
    ]
    jobs = [request(f"r{i}", [i + 3, 5, 7] * (i + 1), p) for i, p in enumerate(params)]
    expected = run(engine(model, method="none"), jobs)
    eng = engine(model, **own)
    graphs = made(eng, Sized())
    told: list[tuple[int, int]] = []
    note = capture_usual(graphs, progress=lambda done, total: told.append((done, total)))
    count = graphs.num_captured
    assert {key.trees for key in graphs._graphs} == kinds
    assert told == [(i + 1, count) for i in range(count)]
    assert note.startswith(f"CUDA graphs: {count} captured in ")
    done = run(eng, jobs)
    assert {n: o.tokens for n, o in done.items()} == {n: o.tokens for n, o in expected.items()}
    report = eng.report()
    assert report["num_graphs"] == count
    assert report["num_steps_without_graph"] == 0
    assert report["graph_bytes"] == count * MB
    assert report["graph_seconds"] > 0


# -- time and memory ---------------------------------------------------------------------------


def ticking(step: float) -> Iterator[float]:
    """Seconds that go by between two looks at a clock."""
    return itertools.count(0.0, step)


def test_a_start_is_cut_short(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What there is no time for is left to the steps that ask for it, and that is said."""
    graphs = made(engine(model, method="none"), Sized())
    clock = ticking(10.0)
    note = capture_usual(graphs, most_seconds=25, clock=lambda: next(clock))
    assert graphs.num_captured == 3
    assert "3 of 6 captured" in note
    assert "not all, because 25 s were over" in note
    assert [r.levelno for r in caplog.records if r.getMessage() == note] == [logging.WARNING]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError(DRIVER)])
def test_too_little_memory_keeps_what_there_is(model: Path, error: RuntimeError) -> None:
    """The allocator's or the driver's refusal: smaller steps are tried, the engine serves all the same."""
    jobs = [
        request(f"r{i}", [i + 3, 5, 7], SamplingParams(max_tokens=9, temperature=0.0))
        for i in range(8)
    ]
    expected = run(engine(model, method="none"), jobs)
    eng = engine(model, method="none", max_rows=8)
    graphs = made(eng, Narrow(error=error))
    note = capture_usual(graphs)
    assert {key.rows for key in graphs._graphs} == {1, 2, 4}
    assert "6 of 8 captured" in note
    assert "no memory for steps of 8 tokens" in note
    assert "max_rows" in note
    assert "graphs off" in note
    done = run(eng, jobs)
    assert {n: o.tokens for n, o in done.items()} == {n: o.tokens for n, o in expected.items()}
    assert eng.report()["num_steps_without_graph"] > 0


def test_what_is_left_without_a_graph_is_said_in_words(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that asked for one: its sizes, not the name of a class."""
    eng = engine(model, method="none")
    made(eng, Sized(room=0))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    run(eng, [request("r", [5, 6], params)])
    (said,) = [r.getMessage() for r in caplog.records if "no memory is left" in r.getMessage()]
    assert "capture a step of 1 row, 1 token (trees: root)" in said
    assert "other graphs hold" not in said
    assert "graphs off" in said


@pytest.mark.parametrize("ask", [capture_usual, trial])
def test_other_errors_are_not_taken_for_a_lack_of_memory(model: Path, ask: Any) -> None:
    """A capture that fails for another reason is a bug, and is raised."""
    graphs = made(
        engine(model, method="none"), Sized(room=0, error=RuntimeError("operation not permitted"))
    )
    with pytest.raises(RuntimeError, match="not permitted"):
        ask(graphs)


def test_what_led_to_an_error_counts() -> None:
    """The end of a capture may complain of a step that had no memory."""
    with pytest.raises(RuntimeError, match="invalidated") as raised:
        _fail_after(torch.OutOfMemoryError("x"))
    assert lacks_memory(raised.value)
    with pytest.raises(RuntimeError, match="invalidated") as raised:
        _fail_after(ValueError("x"))
    assert not lacks_memory(raised.value)


def _fail_after(first: Exception) -> None:
    try:
        raise first
    finally:
        raise RuntimeError("capture was invalidated")


def test_no_more_than_was_set_aside(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beforehand graphs take what the pool left them; on demand they go on, which is said once."""
    eng = engine(model, method="none")
    graphs = made(eng, Sized())
    graphs.set_aside = 3 * MB
    note = capture_usual(graphs)
    assert graphs.num_captured == 3
    assert "the memory set aside for graphs is taken" in note
    for i, k in enumerate([3, 5, 7]):
        params = SamplingParams(max_tokens=4, temperature=1.0, top_k=k, logprobs=i)
        run(eng, [request(f"r{i}", [5, 6], params)])
    assert graphs.num_captured > 4
    said = [r.getMessage() for r in caplog.records if "more than the" in r.getMessage()]
    assert len(said) == 1
    assert "memory_gb" in said[0]


def test_a_trial_says_what_all_will_take(model: Path) -> None:
    """From the largest six, for the contexts that the pool to come can have."""
    graphs = made(engine(model, method="none", max_rows=8), Sized(nbytes=10 * MB))
    count = len(replace(graphs.ladder, max_pages=10**6).usual(graphs.kinds))
    assert count > len(graphs.ladder.usual(graphs.kinds))
    assert trial(graphs) == 10 * MB * 1.5 * count
    assert graphs.num_captured == 6
    nothing = made(engine(model, method="none"), Sized(room=0))
    assert trial(nothing) == 0
    assert "0 of 6 captured" in capture_usual(nothing)
    little = made(engine(model, method="none", max_rows=8), Narrow(nbytes=10 * MB))
    assert trial(little) > 60 * MB, "of what there is memory for"
    assert {key.rows for key in little._graphs} == {1, 2, 4}
    assert set_aside([9 * MB, 100 * MB, 11 * MB], 4) == 120 * MB + 3 * 11 * MB, "whichever is large"
    assert set_aside([100 * MB, 0, 0], 4) == 100 * MB + 5 * 4 * MB, (
        "a driver's step may hide a graph"
    )
    assert set_aside([5 * MB, 5 * MB], 1) == 10 * MB, "no less than was seen"


def sized(config: CacheConfig, **facts: Any) -> PoolSize:
    """A pool for a model with pages of a megabyte."""
    usual = {
        "used": 300 * MB,
        "held": 100 * MB,
        "free": 1000 * MB,
        "graphs": 0,
        "device_type": "cuda",
        "tail": 16,
    }
    return size_pool(config, model_max_len=2048, bytes_per_page=MB, **{**usual, **facts})


def test_the_pool_leaves_room_for_graphs_and_work_space() -> None:
    """Of a stated budget or of a share of what is free: with graphs it is smaller by just that."""
    config = CacheConfig(max_rows=1000, max_len=512)
    share = sized(config)
    assert share.num_pages == 900 - 200
    assert "0.21 GB of work space" in share.note
    with_graphs = sized(config, graphs=150 * MB)
    assert with_graphs.num_pages == share.num_pages - 150
    assert "0.16 GB for CUDA graphs" in with_graphs.note
    stated = replace(config, memory_gb=800 * MB / 1e9)
    assert sized(stated).num_pages == 500
    assert sized(stated, graphs=150 * MB).num_pages == 350
    on_cpu = sized(config, device_type="cpu")
    assert on_cpu.num_pages == 500


def test_too_little_for_one_sequence_beside_graphs() -> None:
    """The refusal names the graphs' part and the ways on."""
    config = CacheConfig(max_rows=4, max_len=2048, memory_gb=600 * MB / 1e9)
    with pytest.raises(MemoryBudgetError) as raised:
        sized(config, graphs=280 * MB)
    said = str(raised.value)
    assert "0.29 GB for CUDA graphs" in said
    assert "max_len <=" in said
    assert "memory_gb" in said
    assert said.endswith("(graphs off), or use device cpu")
    with pytest.raises(MemoryBudgetError) as raised:
        sized(config, device_type="cpu", used=550 * MB)
    assert str(raised.value).endswith("give more memory_gb (or num_pages)"), "it is the CPU"


def test_on_a_gpu_the_trial_has_the_drafter_and_the_graphs(model: Path) -> None:
    """On a CPU it has neither."""
    draft = DraftConfig(method="suffix", num_speculative_tokens=8)
    config = EngineConfig(model=str(model), device="cpu", draft=draft)
    shape = ModelConfig(
        architecture="llama",
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=4096,
    )
    on_cpu, on_gpu = (
        warm_config(config, shape),
        warm_config(replace(config, device="cuda:0"), shape),
    )
    assert (on_cpu.graphs, on_cpu.draft.method) == ("off", "none")
    assert (on_gpu.graphs, on_gpu.draft) == ("beforehand", config.draft)
    assert on_cpu.cache.num_pages is not None
    assert on_gpu.cache.num_pages is not None
    assert on_gpu.cache.num_pages > on_cpu.cache.num_pages, "its trees need a tail"


# -- a whole start -----------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", ["beforehand", "on-demand"])
def test_a_start_measures_sets_aside_and_captures(
    model: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """`Engine.build` as on a GPU: a trial, a pool that leaves what it found, and the usual graphs."""

    class Graphed(Launcher):
        """Has graphs on a CPU too."""

        def __init__(self, parts: Parts, *others: Any) -> None:
            super().__init__(parts, *others)
            self.graphs = graphs_of(parts, Sized())

    told: list[int] = []

    def build(config: EngineConfig) -> Engine:
        return Engine.build(config, progress=lambda done, _: told.append(done))

    without = engine(model, build, method="none", memory_gb=30.0, graphs=graphs)
    monkeypatch.setattr(module, "Launcher", Graphed)
    eng = engine(model, build, method="none", memory_gb=30.0, graphs=graphs)
    aside = eng._launcher.graphs.set_aside
    assert aside > 5 * MB
    assert f"{aside / 1e9:.2f} GB for CUDA graphs" in "".join(eng.notes)
    assert "for CUDA graphs" not in "".join(without.notes)
    captured = [note for note in eng.notes if note.startswith("CUDA graphs: ")]
    if graphs == "on-demand":
        assert captured == told == []
        assert eng.report()["num_graphs"] == 0
        return
    assert len(captured) == 1
    assert "GB set aside" in captured[0]
    assert told == list(range(1, int(eng.report()["num_graphs"]) + 1))
    assert eng.report()["graph_bytes"] == len(told) * MB
