"""The best tree over a block's candidates: both builders against the published heap."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import pytest
import torch

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import DraftTree
from paceline.draft.candidates import Candidates
from paceline.draft.ddtree import DDTreeDrafter, best_first, best_first_host
from tests.oracle.ddtree import best_sums, heap_tree

BUILDERS = [best_first, best_first_host]


def candidates(
    weights: torch.Tensor, generator: torch.Generator, off_spine: torch.Tensor | None = None
) -> Candidates:
    """Candidates of these weights [B, P, C], distinct random tokens at each position."""
    rows, positions, count = weights.shape
    draws = torch.rand(rows, positions, 997, generator=generator)
    ids = draws.argsort(-1)[:, :, :count]
    return Candidates(
        ids=ids,
        scores=weights,
        share=weights[:, :, 0],
        weights=weights,
        off_spine=weights if off_spine is None else off_spine,
    )


def random_case(rng: random.Random) -> tuple[torch.Tensor, Candidates, int, int | None]:
    """Roots, candidates, budget and cap of any kind; often with equal weights."""
    rows, positions, count = rng.randint(1, 4), rng.randint(1, 8), rng.randint(1, 12)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    weights = torch.randn(rows, positions, count, generator=generator) * rng.choice([0.3, 1.0, 3.0])
    weights = weights.log_softmax(-1)
    if rng.random() < 0.4:
        weights = (weights * 2).round() / 2
    if rng.random() < 0.1:
        weights[:, rng.randrange(positions), rng.randrange(count) :] = -torch.inf
    weights = weights.clamp(max=0.0).sort(-1, descending=True).values
    off = (
        weights.clone() if rng.random() < 0.5 else (weights * rng.choice([0.5, 1.5]) - 0.5).round()
    )
    budget = rng.choice([1, 2, 3, 5, 8, 16, 33, 63, 64, 65, 130])
    roots = torch.randint(0, 997, (rows,), generator=generator)
    return roots, candidates(weights, generator, off), budget, rng.choice([None, 1, 2, 5])


def rows_of(tree: DraftTree) -> list[list[tuple[int, int, float]]]:
    """(token, parent, score) of each row's nodes, the root left out."""
    columns = tree.token_ids.tolist(), tree.parents.tolist(), tree.scores.tolist()
    return [
        list(zip(tokens[1:n], parents[1:n], scores[1:n], strict=True))
        for tokens, parents, scores, n in zip(*columns, tree.num_nodes.tolist(), strict=True)
    ]


@pytest.mark.parametrize("build", BUILDERS)
def test_equal_to_the_heap_in_a_thousand_random_cases(build: object) -> None:
    """Nodes, their order, parents, depths, masks and scores, with ties, caps and budgets of any size."""
    rng = random.Random(11)
    for _ in range(1000):
        roots, found, budget, cap = random_case(rng)
        tree = build(roots, found, budget, topk_cap=cap)
        tree.check()
        assert tree.token_ids[:, 0].tolist() == roots.tolist()
        on, off = (w[:, :, :cap].double().tolist() for w in (found.weights, found.off_spine))
        ids = found.ids[:, :, :cap].tolist()
        for mine, *row in zip(rows_of(tree), on, off, ids, strict=True):
            true = heap_tree(*row, budget)
            assert [node[:2] for node in mine] == [node[:2] for node in true]
            assert [node[2] for node in mine] == pytest.approx([node[2] for node in true], abs=1e-5)


def test_the_tree_is_the_best_one() -> None:
    """No prefix outside the tree is likelier than one inside: compared with looking at all of them."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        weights = torch.randn(1, 4, 4, generator=generator).log_softmax(-1)
        weights = weights.sort(-1, descending=True).values
        off = weights * 0.6 - 0.3
        tree = best_first(torch.tensor([5]), candidates(weights, generator, off), 12)
        scores = [score for _, _, score in rows_of(tree)[0]]
        tables = weights[0].double().tolist(), off[0].double().tolist()
        assert scores == pytest.approx(best_sums(*tables, 12), abs=1e-5)


@pytest.mark.parametrize("build", BUILDERS)
def test_padding_is_no_token(build: object) -> None:
    """A row with fewer prefixes than another is padded with what matches nothing, never a real id."""
    weights = torch.full((2, 2, 3), -1.0)
    weights[0, :, 1:] = -torch.inf  # two prefixes only
    weights[1] = torch.tensor([-1.0, -2.0, math.nan])  # NaN: no survival at all
    found = candidates(weights, torch.Generator().manual_seed(0))
    tree = build(torch.tensor([7, 8]), found, 9)
    tree.check()
    assert tree.num_nodes.tolist() == [3, 7]
    padding = torch.arange(tree.token_ids.shape[1]) >= tree.num_nodes[:, None]
    assert bool((tree.token_ids[padding] == -1).all())
    assert bool((tree.mask[padding] == 0).all())


def test_rows_do_not_depend_on_their_company() -> None:
    """A row's tree is the same alone and in a batch."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, 6, 9, generator=generator).log_softmax(-1).sort(-1, descending=True)
    found = candidates(weights.values, generator)
    roots = torch.arange(5)
    together = rows_of(best_first(roots, found, 20))
    for b in range(5):
        mine = Candidates(**{f.name: getattr(found, f.name)[b : b + 1] for f in fields(found)})
        row = slice(b, b + 1)
        assert rows_of(best_first(roots[row], mine, 20))[0] == together[b]


def test_a_budget_of_nothing_is_refused() -> None:
    """Budget 0 is a mistake, and the message says what to do; no file is looked at before."""
    with pytest.raises(ConfigError, match=r"budget of 0 nodes.*Choose drafter 'none'"):
        DDTreeDrafter(DraftConfig(method="ddtree", num_speculative_tokens=0), None)
