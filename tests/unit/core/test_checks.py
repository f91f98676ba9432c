"""`check()` of trees and batches: what tests rely on must notice each broken promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from paceline.core.batch import ForwardBatch, ForwardMode
from paceline.core.tree import DraftTree, Proposal, from_proposals

FORK = Proposal(tokens=[2, 3, 4], parents=[-1, -1, 1], scores=[-1, -2, -3])
LINE = Proposal(tokens=[2], parents=[-1], scores=[-1])


def tree(wide: int = 0) -> DraftTree:
    """A fork and a chain beside it; with `wide` more children of the first root."""
    more = Proposal(
        tokens=[*FORK.tokens, *range(5, 5 + wide)],
        parents=[*FORK.parents, *[-1] * wide],
        scores=[*FORK.scores, *[-4] * wide],
    )
    return from_proposals([1, 1], [more, LINE])


def batch() -> ForwardBatch:
    """A verify of the fork (prefix 5, pages of 4) and of the chain (prefix 0), a dead token after."""
    return ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=2,
        q_len=4,
        rows=torch.tensor([0, 1]),
        token_ids=torch.tensor([1, 2, 3, 4, 1, 2, 0]),
        positions=torch.tensor([5, 6, 6, 7, 0, 1, 0]),
        slots=torch.tensor([5, 6, 7, 8, 12, 13, -1]),
        prefix_lens=torch.tensor([5, 0]),
        cu_q=torch.tensor([0, 4, 6]),
        tail_lens=torch.tensor([4, 2]),
        mask=torch.tensor([[1], [3], [5], [13], [1], [3], [0]]),
        pages=torch.tensor([[0, 1, 2], [3, 4, 4]], dtype=torch.int32),
        logits_at=torch.tensor([0, 5]),
    )


def test_what_is_right_passes() -> None:
    """A check that objects to good trees and batches would be switched off soon."""
    tree().check()
    tree(wide=90).check()
    batch().check()
    plain = replace(batch(), mode=ForwardMode.EXTEND, mask=None)
    plain.check()


def put(tensor: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[at] = value
    return changed


TREES: Mapping[str, tuple[str, tuple[int, ...], float, str]] = {
    "no root": ("num_nodes", (1,), 0, "a root and at most"),
    "too many": ("num_nodes", (1,), 5, "a root and at most"),
    "a root with a parent": ("parents", (0, 0), 0, "node 0 is the root"),
    "a root that scores": ("scores", (0, 0), -0.5, "node 0 is the root"),
    "a child before its parent": ("parents", (0, 1), 2, "parents precede children"),
    "a second root": ("parents", (0, 2), -1, "parents precede children"),
    "a wrong depth": ("depths", (0, 3), 1, "one deeper"),
    "a child above its parent": ("scores", (0, 3), -1, "above its parent"),
    "a score that is no number": ("scores", (0, 2), float("nan"), "above its parent"),
    "padding that scores": ("scores", (1, 3), -9, "padding must score"),
    "a node without a token": ("token_ids", (0, 2), -1, "has a token"),
    "a mask of somebody else": ("mask", (0, 3, 0), 0b1011, "ancestor bits"),
    "a mask without itself": ("mask", (1, 1, 0), 0b01, "ancestor bits"),
}


@pytest.mark.parametrize("name", TREES)
def test_a_broken_tree_is_noticed(name: str) -> None:
    """Every invariant of `DraftTree`."""
    field, at, value, message = TREES[name]
    good = tree()
    with pytest.raises(AssertionError, match=message):
        replace(good, **{field: put(getattr(good, field), at, value)}).check()


def test_wrong_shapes_and_dtypes_of_a_tree_are_noticed() -> None:
    """Kernels trust them."""
    good = tree()
    for item in fields(DraftTree):
        value = getattr(good, item.name)
        if item.name != "token_ids":  # what the others are compared with
            with pytest.raises(AssertionError, match=f"{item.name} must be"):
                replace(good, **{item.name: value[..., :-1]}).check()
        with pytest.raises(AssertionError, match=f"{item.name} must be torch"):
            replace(good, **{item.name: value.to(torch.int16)}).check()


BATCHES: Mapping[str, tuple[str, tuple[int, ...], float, str]] = {
    "a gap before the first row": ("cu_q", (0,), 1, "come first"),
    "offsets that fall": ("cu_q", (1,), 7, "may not fall"),
    "more queries than q_len": ("cu_q", (1,), 5, "q_len"),
    "more queries than tokens": ("cu_q", (2,), 8, "more queries than tokens"),
    "more queries than tail keys": ("tail_lens", (0,), 3, "queries are tail keys"),
    "a negative prefix": ("prefix_lens", (1,), -1, "prefix"),
    "a negative token": ("token_ids", (6,), -2, "a token is none"),
    "a negative position": ("positions", (1,), -1, "a position is none"),
    "an impossible slot": ("slots", (1,), -3, "a slot is -1"),
    "a shared slot": ("slots", (4,), 8, "share a slot"),
    "a dead token that writes": ("slots", (6,), 14, "a dead token writes"),
    "a pick from a dead token": ("logits_at", (1,), 6, "nothing to pick"),
    "a blind query": ("mask", (2, 0), 0b001, "does not see itself"),
    "a query that sees too far": ("mask", (5, 0), 0b111, "past its row's tail"),
    "a dead token that sees": ("mask", (6, 0), 1, "a dead token sees"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_broken_batch_is_noticed(name: str) -> None:
    """Every promise of `ForwardBatch` that an attention backend relies on."""
    field, at, value, message = BATCHES[name]
    good = batch()
    with pytest.raises(AssertionError, match=message):
        replace(good, **{field: put(getattr(good, field), at, value)}).check()


def test_wrong_shapes_of_a_batch_are_noticed() -> None:
    """Rows, tokens and pages go together; padded rows ask for nothing; prefill has no mask."""
    good = batch()
    for name in ("rows", "positions", "slots", "cu_q", "tail_lens", "pages"):
        with pytest.raises(AssertionError, match=f"{name} must be"):
            replace(good, **{name: getattr(good, name)[:-1]}).check()
    for name, value, message in (
        ("pages", good.pages.long(), "int32"),
        ("mask", good.mask[:-1], r"mask must be \[T, W\]"),
        ("features", torch.zeros(6, 2), "features"),
        ("num_rows", 1, "padded rows"),
        ("mode", ForwardMode.EXTEND, "prefill is causal"),
    ):
        with pytest.raises(AssertionError, match=message):
            replace(good, **{name: value}).check()
