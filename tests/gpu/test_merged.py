"""Several drafters as one on a CUDA device: lossless, the host's fold, and no sync in a fold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.tree import Proposal, proposals_of
from paceline.draft.merged import fold_trees, padded_tree
from paceline.engine.engine import Engine
from tests import tiny, tiny_drafters
from tests.engine.harness import engine, request, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [[11, 12, 13, 14, 15] * 4, [31, 7, 7, 9, 31], [5], [(3 * i) % 23 + 3 for i in range(33)]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless(tmp_path: Path, temperature: float) -> None:
    """In float64, tokens are the CPU's autoregressive ones, whoever proposed them."""
    base = tiny.write_tiny(tmp_path / "target", "llama", seed=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=2)
    jobs = [request(str(i), p, params) for i, p in enumerate(PROMPTS)]
    plain = run(engine(base, method="none"), jobs)
    texts = [p + plain[str(i)].tokens for i, p in enumerate(PROMPTS)]
    folder = tiny_drafters.overfit_dflash(tmp_path / "drafter", base, texts, steps=60)
    eng = engine(base, Engine.build, method="merged", model=str(folder), device="cuda")
    done = run(eng, jobs)
    assert {n: o.tokens for n, o in done.items()} == {n: o.tokens for n, o in plain.items()}
    assert eng.report()["spec_decode_num_accepted_tokens"] > 0


def test_the_device_folds_as_the_host_does() -> None:
    """The same nodes, scores and sources; from the third time on without waiting for the device."""
    chain = Proposal(tokens=[1, 2, 3], parents=[-1, 0, 1], scores=[-0.5, -1, -2], sources=[1] * 3)
    fork = Proposal(tokens=[1, 2, 4], parents=[-1, 0, 0], scores=[-1, -1.25, -3], sources=[4] * 3)
    host = [padded_tree([one, other], 6) for one, other in ((chain, fork), (fork, fork))]
    device = torch.device("cuda")
    trees, roots = [tree.to(device) for tree in host], torch.tensor([8, 9], device=device)
    for count in range(4):
        torch.cuda.set_sync_debug_mode("error" if count > 2 else "default")
        try:
            found = fold_trees(roots, trees, 5, 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    mine = found.to(torch.device("cpu"))
    mine.check()
    assert proposals_of(mine) == proposals_of(fold_trees(roots.cpu(), host, 5, 4))
