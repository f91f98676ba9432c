"""Candidates and draft trees on a CUDA device: the kernels are the definitions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from paceline.ops import drafts
from tests import candidates_grid as grid
from tests.gpu_capture import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "check",
    [
        grid.check_largest,
        grid.check_rank,
        grid.check_learn,
        grid.check_growth,
        grid.check_noise,
        grid.check_chain,
        grid.check_emitted,
    ],
)
def test_kernels_are_the_definition(check: Callable[[random.Random, str], None]) -> None:
    """Any shapes, ties, numbers that are none; trees bit for bit."""
    rng = random.Random(7)
    torch.manual_seed(7)
    for _ in range(200):
        check(rng, "cuda")


@pytest.mark.parametrize("vocab", [32_000, 49_152, 128_256, 151_936])
@pytest.mark.parametrize("rows, positions, count", [(1, 15, 128), (9, 7, 16), (1, 2, 500)])
def test_the_largest_of_a_model_s_vocabulary(
    vocab: int, rows: int, positions: int, count: int
) -> None:
    """Numbers that are all different and such as tie, in a graph that is replayed with other logits."""
    temperature = torch.tensor([0.0, 0.7, 1.0] * 3, dtype=torch.float64, device="cuda")[:rows]
    logits = torch.empty(rows, positions, vocab, device="cuda")
    logits.normal_()
    graph, (top, ids, mass) = captured(lambda: drafts.largest(logits, temperature, count))
    generator = torch.Generator("cuda").manual_seed(3)
    for spread, rounds in ((4.0, False), (4.0, True), (0.0, False)):
        logits.normal_(generator=generator).mul_(spread)
        if rounds:
            logits.copy_(logits.bfloat16())
        graph.replay()
        heat = torch.where(temperature > 0, temperature, 1.0).float()[:, None, None]
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(ids, order[:, :, :count].sort(dim=-1).values)
        assert torch.equal(top, (logits / heat).gather(-1, ids))
        exact = (logits.double() / heat.double()).logsumexp(-1)
        torch.testing.assert_close(mass.double(), exact, rtol=1e-6, atol=1e-5)


def test_learning_is_captured() -> None:
    """A replayed graph learns on: what is learned stays in the memory that it saw."""
    from paceline.draft.candidates import Calibration, Candidates

    torch.manual_seed(1)
    calibration = Calibration(3, torch.device("cuda"))
    ids = torch.stack([torch.randperm(50)[:16] for _ in range(6)]).view(2, 3, 16).cuda()
    scores = torch.randn(2, 3, 16).sort(-1, descending=True).values.cuda()
    share = torch.full((2, 3), -0.1, device="cuda")
    found = Candidates(ids=ids, scores=scores, share=share, weights=scores, off_spine=scores)
    temperature = torch.tensor([0.0, 1.0], device="cuda", dtype=torch.float64)
    emitted = ids[:, :, 0].clone()
    calibration.learn(found, temperature, emitted)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calibration.learn(found, temperature, emitted)
    before = [x.clone() for x in (calibration._log, calibration._held)]
    graph.replay()
    once = [x.clone() for x in (calibration._log, calibration._held)]
    emitted.fill_(-1)
    graph.replay()
    twice = [x.clone() for x in (calibration._log, calibration._held)]
    for a, b, c in zip(before, once, twice, strict=True):
        assert not torch.equal(a, b), "a replay learns"
        assert torch.equal(b, c), "from nothing nothing is learned"
