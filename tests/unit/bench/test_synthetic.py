"""Acceptance that was said beforehand: means are met, paths are real paths, limits hold."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.bench.synthetic import SyntheticWalk, rates_of
from paceline.core.request import SamplingParams
from paceline.core.tree import DraftTree, Proposal, from_proposals
from paceline.ops.reference.tree import select
from paceline.sample.options import SamplingTable

V, R = 50, 4
CPU = torch.device("cpu")


def table(limits: list[int]) -> SamplingTable:
    found = SamplingTable(R, V, CPU, 1)
    for row, limit in enumerate(limits):
        found.assign(
            row,
            SamplingParams(temperature=0.0),
            seed=row,
            sample_index=0,
            prompt_ids=[1],
            output_ids=[],
            stop_ids=[],
            limit=limit,
        )
    found.apply()
    found.live[: len(limits)] = True
    return found


def trees(rng: random.Random, rows: int, most: int) -> DraftTree:
    proposals = []
    for _ in range(rows):
        n = rng.randrange(most + 1)
        proposals.append(
            Proposal(
                tokens=[rng.randrange(V) for _ in range(n)],
                parents=[rng.randrange(-1, i) for i in range(n)],
                scores=[-float(i + 1) for i in range(n)],
            )
        )
    return from_proposals([rng.randrange(V) for _ in range(rows)], proposals)


def walked(walk: SyntheticWalk, tree: DraftTree, options: SamplingTable, lens: list[int]):
    rows = torch.arange(len(lens))
    chosen = select(tree, rows, int(tree.num_nodes.sum()), tree.num_nodes - 1)
    hidden = torch.zeros(chosen.node.shape[0], 3)
    verdict = walk(
        *(tree, chosen, hidden, lambda h: torch.zeros(h.shape[0], V), options, rows),
        *(torch.tensor(lens), rows.tolist()),
    )
    return chosen, verdict


@pytest.mark.parametrize(
    "rates,mean", [((1.0, 0.5), 2.5), ((0.8, 0.6, 0.4, 0.2), 3.0), ((), 1.0), ((1.0,) * 4, 5.0)]
)
def test_means_are_met_within_a_few_steps(rates: tuple[float, ...], mean: float) -> None:
    """Each position's own share too: no chance is involved."""
    walk = SyntheticWalk(rates, num_rows=R, device=CPU)
    chain = Proposal(tokens=[7] * 6, parents=range(-1, 5), scores=[-1.0] * 6)
    tree = from_proposals([3, 3], [chain, chain])
    options = table([10_000] * 2)
    counts = torch.stack([walked(walk, tree, options, [5, 9])[1].count for _ in range(200)])
    assert counts.double().mean() == pytest.approx(mean, abs=0.03)
    for i, rate in enumerate(rates):
        assert (counts > i + 1).double().mean() == pytest.approx(rate, abs=0.02)


def test_paths_lead_from_the_root_to_the_deepest_node() -> None:
    """Whatever the tree: a step that moved other nodes would measure something else."""
    rng = random.Random(3)
    walk = SyntheticWalk((1.0,) * 20, num_rows=R, device=CPU)
    options = table([10_000] * 3)
    for _ in range(60):
        tree = trees(rng, 3, 9)
        chosen, verdict = walked(walk, tree, options, [4, 5, 6])
        for b in range(3):
            path = [i for i in verdict.path[b].tolist() if i >= 0]
            nodes = [int(chosen.node[chosen.cu_q[b] + i]) % tree.token_ids.shape[1] for i in path]
            assert nodes[0] == 0
            assert [int(tree.parents[b, n]) for n in nodes[1:]] == nodes[:-1]
            real = int(tree.num_nodes[b])
            assert len(nodes) == 1 + int(tree.depths[b, :real].max())
            tokens = [t for t in verdict.path_tokens[b].tolist() if t >= 0]
            assert tokens == [int(tree.token_ids[b, n]) for n in nodes]
            assert int(verdict.count[b]) == len(nodes)
            assert bool(verdict.alive[b])


def test_a_row_s_limit_and_end_hold() -> None:
    """A row emits no more than it may, ends there, and one that is not live emits nothing."""
    walk = SyntheticWalk((1.0,) * 6, num_rows=R, device=CPU)
    chain = Proposal(tokens=[7] * 6, parents=range(-1, 5), scores=[-1.0] * 6)
    tree = from_proposals([3] * 3, [chain] * 3)
    options = table([10, 100, 100])
    options.live[2] = False
    _, verdict = walked(walk, tree, options, [6, 6, 6])  # 7 tokens are known: 3 may come
    assert verdict.count.tolist() == [3, 7, 0]
    assert verdict.alive.tolist() == [False, True, False]
    assert verdict.path[2].tolist() == [-1] * 7


def test_a_length_becomes_rates() -> None:
    """Their sum, and the bonus token, is the length."""
    assert rates_of(1.0) == ()
    assert rates_of(3.0) == (1.0, 1.0)
    assert rates_of(3.5) == (1.0, 1.0, 0.5)
    assert 1 + sum(rates_of(6.3)) == pytest.approx(6.3)
