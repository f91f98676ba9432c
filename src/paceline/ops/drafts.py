"""Operators of drafter networks on candidates and trees, dispatched on their device; part of `paceline.ops`.

What they compute is said in `candidates.py`, `chain.py` and `growth.py` of `ops/reference` and, of noise, in
`sample/noise.py`: arguments and results are those of the functions of the same name there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.ops.dispatch import implementation

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.tree import DraftTree
    from paceline.ops.reference.candidates import Five


def _chosen(op: str, x: Tensor, dtype: torch.dtype) -> Any:
    return implementation(op, "cpu" if x.is_cpu else x.device.type, dtype)


def largest(
    logits: Tensor, temperature: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each position's `count` largest logits, tempered; their ids; the mass of all."""
    op = _chosen("largest", logits, logits.dtype)
    found: tuple[Tensor, Tensor, Tensor] = op(logits, temperature, count)
    return found


def rank_candidates(
    top: Tensor,
    ids: Tensor,
    mass: Tensor,
    noise: Tensor | None,
    temperature: Tensor,
    log: Tensor,
    held: Tensor,
    claimed: Tensor,
) -> Five:
    """Order candidates by perturbed score, among equals by id; weigh them."""
    op = _chosen("rank_candidates", top, top.dtype)
    found: Five = op(top, ids, mass, noise, temperature, log, held, claimed)
    return found


def learn(
    ids: Tensor,
    scores: Tensor,
    share: Tensor,
    temperature: Tensor,
    emitted: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    kept: float,
    bounds: tuple[float, float],
) -> None:
    """Learn from the emitted tokens, in place, what gaps between candidates' scores mean."""
    op = _chosen("learn", scores, scores.dtype)
    op(ids, scores, share, temperature, emitted, tables, kept, bounds)


def best_first(
    roots: Tensor, ids: Tensor, on: Tensor, off: Tensor, budget: int, width: int, source: int
) -> DraftTree:
    """The `budget` best prefixes of every row's candidates, as a tree."""
    op = _chosen("best_first", on, torch.float32)
    found: DraftTree = op(roots, ids, on, off, budget, width, source)
    return found


def keyed_noise(
    rows: Tensor, positions: Tensor, token_ids: Tensor, keys: Tensor, temperature: Tensor
) -> Tensor:
    """What a pick adds to the scores of some tokens [M, n], float32; 0 in greedy rows."""
    op = _chosen("keyed_noise", token_ids, torch.float32)
    found: Tensor = op(rows, positions, token_ids, keys, temperature)
    return found


def noise_ahead(
    rows: Tensor, lens: Tensor, token_ids: Tensor, keys: Tensor, temperature: Tensor
) -> Tensor:
    """`keyed_noise` of tokens [B, P, C] to be emitted at the first P positions after each row's root."""
    op = _chosen("noise_ahead", token_ids, torch.float32)
    found: Tensor = op(rows, lens, token_ids, keys, temperature)
    return found


def chain(roots: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and scores [B, 1 + P] of the chain of every position's best candidate."""
    op = _chosen("chain", weights, weights.dtype)
    found: tuple[Tensor, Tensor] = op(roots, ids, weights)
    return found


def emitted(cu: Tensor, next_ids: Tensor, positions: int) -> Tensor:
    """What each row emitted at its first P positions [B, P], -1 where it emitted less."""
    op = _chosen("emitted", cu, torch.float32)
    found: Tensor = op(cu, next_ids, positions)
    return found
