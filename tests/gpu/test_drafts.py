"""Candidates and draft trees on a CUDA device: the kernels are the definitions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests import candidates_grid as grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "check", [grid.check_rank, grid.check_learn, grid.check_growth, grid.check_noise]
)
def test_kernels_are_the_definition(check: Callable[[random.Random, str], None]) -> None:
    """Any shapes, ties, numbers that are none; trees bit for bit."""
    rng = random.Random(7)
    torch.manual_seed(7)
    for _ in range(200):
        check(rng, "cuda")


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
