"""Sampling and verification on a CUDA device: the same tokens, the same bits in company, no sync."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.tree import DraftTree, Selection, Verdict, from_proposals
from paceline.ops.reference.tree import select
from paceline.sample.options import SamplingTable
from paceline.sample.sampler import PickNodes, Picks, choose
from paceline.sample.verifier import verify
from tests.oracle import tree as tree_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

V = 1003
MIX = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2
    ),
    SamplingParams(temperature=0.7, logit_bias={5: 4.0, 900: 3.0}, banned_token_ids=[7]),
    SamplingParams(temperature=0.5, min_tokens=50),
]


def table_of(num: int, device: str) -> SamplingTable:
    table = SamplingTable(num, V, device, num)
    for row in range(num):
        table.assign(
            row,
            MIX[row % len(MIX)],
            seed=row,
            sample_index=row % 3,
            prompt_ids=[1, 2, 3],
            output_ids=[row % V],
            stop_ids=range(40, 60),
            limit=30,
        )
    table.apply()
    return table


def nodes_of(rows: list[int], device: str) -> PickNodes:
    return PickNodes(
        rows=torch.tensor(rows, device=device),
        positions=torch.tensor([4 + r % 3 for r in rows], device=device),
        num_output=torch.tensor([1 + r % 3 for r in rows], device=device),
        path_tokens=torch.tensor([[r % V, -1] for r in rows], device=device),
        allowed=None,
        host_rows=sorted(set(rows)),
    )


def test_tokens_are_the_cpus_tokens() -> None:
    """In float64 the device's mathematics differ by less than any gap: every token agrees."""
    rows = list(range(128))
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        logits = torch.randn(128, V, dtype=torch.float64, generator=gen) * 3
        want = choose(logits, nodes_of(rows, "cpu"), table_of(128, "cpu"))
        got = choose(logits.cuda(), nodes_of(rows, "cuda"), table_of(128, "cuda"))
        assert torch.equal(got.tokens.cpu(), want.tokens)
        for name in ("top_ids", "logprobs", "top_logprobs"):
            torch.testing.assert_close(
                getattr(got, name).cpu(), getattr(want, name), equal_nan=True, rtol=0, atol=1e-9
            )


def test_a_row_does_not_depend_on_its_company() -> None:
    """1, 8 or 128 rows: token and log-probabilities of a row are the same bits."""
    table = table_of(128, "cuda")
    logits = torch.randn(128, V, device="cuda") * 3
    logits[::4] = (logits[::4] * 2).round() / 2
    whole = choose(logits, nodes_of(list(range(128)), "cuda"), table)
    rng = random.Random(0)
    for size in (1, 8, 64):
        rows = rng.sample(range(128), size)
        part: Picks = choose(logits[rows], nodes_of(rows, "cuda"), table)
        assert torch.equal(part.tokens, whole.tokens[rows])
        if part.logprobs is not None:
            assert whole.logprobs is not None
            assert torch.equal(part.logprobs.nan_to_num(), whole.logprobs[rows].nan_to_num())


def on(device: str, tree: DraftTree) -> DraftTree:
    names = ("token_ids", "parents", "depths", "mask", "scores", "sources", "num_nodes")
    return replace(tree, **{n: getattr(tree, n).to(device) for n in names})


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_is_the_cpus_step_and_never_waits_for_the_host() -> None:
    """Select, verify and commit: equal verdicts, and no read of a device value on the way."""
    rng = random.Random(4)
    batch = 14
    for case in range(20):
        props = [tree_oracle.random_proposal(rng, rng.randint(0, 12), 6) for _ in range(batch)]
        tree = from_proposals([1] * batch, props)
        width = tree.token_ids.shape[1]
        budget = rng.randint(batch, batch * width)
        caps = torch.full((batch,), 9)
        ids, lens = torch.arange(batch), torch.full((batch,), 20)
        weight = torch.randn(V, 16, dtype=torch.float64)
        weight[:6] *= 3
        state = torch.randn(batch * width, 16, dtype=torch.float64)

        def run(device: str) -> tuple[Selection, Verdict]:
            table, there = table_of(batch, device), on(device, tree)  # noqa: B023
            args = [x.to(device) for x in (ids, caps, lens, state, weight)]  # noqa: B023
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                chosen = select(there, args[0], budget, args[1])  # noqa: B023
                hidden = args[3][chosen.node.clamp(min=0)]
                verdict = verify(
                    there,
                    chosen,
                    hidden,
                    lambda h: h @ args[4].T,
                    table,
                    args[0],
                    args[2],
                    list(range(batch)),
                )
                table.commit(args[0], verdict.path_tokens, list(range(batch)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return chosen, verdict

        chosen, want = run("cpu")
        fixed, got = run("cuda")
        real = len(chosen.node)
        assert torch.equal(fixed.node[:real].cpu(), chosen.node)
        assert torch.equal(fixed.mask[:real].cpu(), chosen.mask)
        assert (fixed.node[real:] == -1).all()
        levels = want.path.shape[1]
        for name in ("path", "path_tokens"):
            assert torch.equal(getattr(got, name)[:, :levels].cpu(), getattr(want, name)), case
        for name in ("count", "next_token", "alive"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), case
