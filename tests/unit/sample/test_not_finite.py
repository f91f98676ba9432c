"""Logits from which no token can be chosen: NaN, infinities, nothing but -inf behind the masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.tree import NOT_FINITE, DraftTree, Selection, Verdict
from paceline.ops.reference.verify import emitted_tokens
from paceline.sample.sampler import choose, choose_host
from tests.oracle.toy import Verify
from tests.unit.sample.test_pick import V, nodes_of, table_of
from tests.unit.sample.test_verifier import BOTH, CHAIN, step


@pytest.mark.parametrize("way", [choose, choose_host])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_masks_leave_only_minus_infinity_has_no_token(
    way: type[choose], temperature: float
) -> None:
    """Tokens that the model itself rules out are fine, unless they are all that a request allows."""
    params = {"temperature": temperature, "logprobs": 3, "top_k": 9, "top_p": 0.9}
    table = table_of(
        [
            SamplingParams(**params, allowed_token_ids=[4, 5]),
            SamplingParams(**params, allowed_token_ids=[4, 5, 6]),
            SamplingParams(**params),
        ]
    )
    logits = torch.randn(3, V)
    logits[:, [4, 5]] = -torch.inf
    got = way(logits, nodes_of([0, 1, 2]), table)
    assert got.tokens[:2].tolist() == [NOT_FINITE, 6]
    assert 0 <= int(got.tokens[2]) < V
    assert got.logprobs is not None
    assert got.logprobs.isfinite().tolist() == [False, True, True]


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("at", range(4))
def test_a_node_with_nan_ends_the_path_it_is_reached_by(way: Verify, at: int) -> None:
    """What was accepted above the broken node is emitted; nothing is after it."""

    def broken(tree: DraftTree, chosen: Selection, hidden: torch.Tensor, *rest: Any) -> Verdict:
        hidden[at, 3] = torch.nan
        return way(tree, chosen, hidden, *rest)

    targets = {(0, 0): 2, (0, 1): 3, (0, 2): 4, (0, 3): 5}
    verdict = step([CHAIN], targets, broken)
    assert verdict.count.tolist() == [at + 1]
    assert verdict.path_tokens[0, : at + 1].tolist() == [1, 2, 3, 4][: at + 1]
    assert verdict.next_token.tolist() == [NOT_FINITE]
    assert verdict.alive.tolist() == [False]
    assert emitted_tokens(verdict).tolist() == [[2, 3, 4][:at] + [NOT_FINITE] + [-1] * (3 - at)]
    if at:  # a broken node that the walk does not reach does not matter
        assert step([CHAIN], {(0, 0): 20}, broken).alive.tolist() == [True]
