"""Trees that are only verified: as many nodes as were asked for reach the target, in every row and in all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.bench.fixed_trees import FixedTrees, sizes
from paceline.bench.step_cases import Case, Spec, parse_spec
from paceline.bench.steps import Bench, Settings, _timed, run
from paceline.core.config import CacheConfig, EngineConfig
from paceline.engine.graphs import Recorded, Step, Trees
from paceline.engine.step_tensors import StepTensors
from tests import tiny
from tests.engine.as_on_gpu import Calls, as_on_gpu, greedy

CASES = [Case(sequences=n, context=20) for n in (1, 3, 8)]
SETTINGS = Settings(steps=4, repeats=1, warmup=1, stage_steps=0)
SPECS = ["chain:5", "uneven:4:16"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    whole = tiny.write_tiny(
        tmp_path_factory.mktemp("fixed") / "whole", "qwen3", max_position_embeddings=1024
    )
    for file in whole.glob("*.safetensors"):
        file.unlink()
    config = EngineConfig(
        model=str(whole),
        device="cpu",
        dtype="float32",
        weights="bf16",
        threads=1,
        cache=CacheConfig(page_size=4, chunk_size=64),
    )
    return Bench(config, random_weights=0)


class Watched(Calls):
    """Keeps how many draft nodes of each row were verified, step by step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []  # rows of the step, padded; draft nodes

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""

        def watched() -> StepTensors:
            made = step()
            assert made.drafted is not None
            self.seen.append((made.drafted.shape[0], made.drafted.tolist()))
            return made

        return super().record(watched)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 64, 100])
@pytest.mark.parametrize("mean,most", [(4, 16), (2, 3), (5, 5), (4, 256), (200, 256), (2, 256)])
def test_sizes_add_up(rows: int, mean: int, most: int) -> None:
    """No step verifies more or fewer tokens than were asked for, whatever the number of rows."""
    found = sizes(rows, mean, most)
    assert len(found) == rows
    assert sum(found) == rows * mean
    assert min(found) >= 1
    assert max(found) <= most


def test_sizes_are_uneven_and_mixed() -> None:
    """Sixty-four rows have every extreme, mostly short chains, and neighbours are not of one size."""
    found = sizes(64, 4, 16)
    assert (min(found), max(found)) == (1, 16)
    assert sum(size <= 2 for size in found) > 32
    assert len(set(found)) > 8
    assert max(sum(found[i : i + 8]) for i in range(57)) < 2 * 32


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("mean,most", [(16, 16), (4, 16), (100, 200)])
def test_trees_are_trees(rows: int, mean: int, most: int) -> None:
    """Of the sizes that were asked for, with the rows' own roots and tokens of the vocabulary."""
    drafter = FixedTrees("x", mean=mean, most=most, vocab_size=50, device=torch.device("cpu"))

    class Runtime:
        def next_token(self, ids: torch.Tensor) -> torch.Tensor:
            return 30 + ids % 7

    told: Any = Runtime()
    drafter.attach(told)
    for start in (0, 3):
        ids = torch.arange(start, start + rows)
        tree = drafter.propose(ids)
        tree.check()
        assert tree.num_nodes.tolist() == sizes(rows, mean, most)
        assert tree.token_ids[:, 0].tolist() == (30 + ids % 7).tolist()
        assert int(tree.token_ids.max()) < 50


@pytest.mark.parametrize("name", SPECS)
def test_as_on_a_gpu_every_node_is_verified_and_no_other(bench: Bench, name: str) -> None:
    """A graph for so many tokens as there are nodes, not for the largest tree of every row."""
    spec, watched = parse_spec(name), Watched()
    with bench.engine(spec, CASES, SETTINGS) as engine:
        assert not engine._parts.proposer.observes
        graphs = as_on_gpu(engine, watched)
        assert engine.lag == 1
        for case in CASES:
            padded = {1: 1, 3: 4, 8: 8}[case.sequences]
            watched.seen.clear()
            measured = _timed(engine, case, SETTINGS)
            wanted = [n - 1 for n in sizes(padded, spec.nodes, spec.most)][: case.sequences]
            full = [nodes[: len(wanted)] for _, nodes in watched.seen if len(nodes) == padded]
            assert full.count(wanted) >= SETTINGS.steps
            assert measured.without_graph == measured.captured == 0
        engine.check_integrity()
    grown = {key.rows: key.tokens for key in graphs._graphs if key.trees is Trees.GROWN}
    assert grown == {rows: rows * spec.nodes for rows in grown}
    assert set(grown) >= {1, 4, 8}


@pytest.mark.parametrize("name", SPECS)
def test_they_change_no_token(bench: Bench, name: str) -> None:
    """Trees of nonsense, verified as any: what is emitted is what plain decoding emits."""
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    found = []
    for spec in (Spec(name="none", method="none"), parse_spec(name)):
        with bench.engine(spec, [Case(sequences=3, context=40)], SETTINGS) as engine:
            as_on_gpu(engine)
            found.append(greedy(engine, prompts))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", SPECS)
def test_steps_and_their_parts_are_measured(bench: Bench, name: str) -> None:
    """Without a graph too; there is nothing to observe."""
    settings = Settings(steps=2, repeats=1, warmup=1, stage_steps=2)
    (measured,) = run(bench, parse_spec(name), CASES[1:2], settings)
    assert measured.accept_length >= 1.0
    assert set(measured.stages) == {"propose", "select", "verify", "walk", "commit"}
