"""The tree of plain decoding."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from paceline.core.tree import EMPTY, DraftTree, from_proposals, root


@pytest.mark.parametrize("rows", [1, 3])
def test_a_root_is_a_tree_without_proposals(rows: int) -> None:
    """Field by field; and what is constant is made at once: a GPU would launch a kernel for each."""
    tokens = torch.arange(5, 5 + rows)
    tree, want = root(tokens), from_proposals(tokens.tolist(), [EMPTY] * rows)
    tree.check()
    for field in fields(DraftTree):
        mine, true = getattr(tree, field.name), getattr(want, field.name)
        assert mine.dtype == true.dtype
        assert torch.equal(mine, true), field.name
    constant = [getattr(tree, f.name) for f in fields(DraftTree) if f.name != "token_ids"]
    assert len({x.untyped_storage().data_ptr() for x in constant}) == 1
