"""A draft vocabulary's two maps in a checkpoint: `d2t` and `t2d`, and whether they can be true.

    d2t[v] + v   the target's id of draft token v; strictly increasing, below V
    t2d[w]       whether the target's token w can be drafted

A wrong map is the quietest way to lose all acceptance: drafts are well-formed, and outputs right. So
everything that follows from the format is checked, and what usually went wrong is named. A checkpoint
without maps is one whose draft vocabulary is the target's.

Letters: V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.models.checkpoint import Checkpoint

D2T, T2D = "d2t", "t2d"


def read(source: Checkpoint, vocab_size: int, draft_vocab_size: int) -> tuple[Tensor, list[str]]:
    """The target's id of each draft token, and everything that is wrong with the maps.

    Args:
        source: the checkpoint.
        vocab_size: V.
        draft_vocab_size: Vd.

    Returns:
        [Vd] int64 (of use only without problems), and a clause for each problem.
    """
    own = torch.arange(draft_vocab_size)
    problems = []
    shapes = {D2T: (draft_vocab_size,), T2D: (vocab_size,)}
    for name, shape in shapes.items():
        found = source.shapes.get(name, shape)
        if found != shape:
            problems.append(f"wrong shape {list(found)} instead of {list(shape)}: {name}")
    if D2T not in source.shapes and draft_vocab_size < vocab_size:
        problems.append(f"missing: {D2T}, which a draft vocabulary smaller than the target's needs")
    if problems:
        return own, problems
    offsets = source.read(D2T) if D2T in source.shapes else torch.zeros_like(own)
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        return own, [f"{D2T} holds {offsets.dtype}; it must hold whole numbers"]
    offsets = offsets.to(torch.int64)
    drafted = None
    if T2D in source.shapes:
        drafted = source.read(T2D).to(torch.bool).nonzero().squeeze(1)
    return own + offsets, _faults(offsets, drafted, vocab_size)


def tables(d2t: Tensor, t2d: Tensor) -> dict[str, Tensor]:
    """The maps as a checkpoint stores them: offsets [Vd] int64 and [V] bool.

    Args:
        d2t: [Vd] int64 target ids.
        t2d: [V] bool.
    """
    own = torch.arange(d2t.shape[0], device=d2t.device)
    return {D2T: (d2t - own).cpu(), T2D: t2d.cpu()}


def _faults(offsets: Tensor, drafted: Tensor | None, vocab_size: int) -> list[str]:
    """What is wrong with maps of the right shape.

    Args:
        offsets: [Vd] int64, as stored.
        drafted: [n] int64, the ids that `t2d` marks; None without one.
        vocab_size: V.
    """
    count = offsets.shape[0]
    ids = torch.arange(count) + offsets
    if count < vocab_size and not offsets.any():
        fault = (
            f"{D2T} is all zero: the draft's {count} tokens would be the target's first {count}, "
            "which no count of a text gives; the map was never set"
        )
        return [fault]
    if drafted is not None and count < vocab_size and torch.equal(offsets, drafted):
        return [f"{D2T} holds token ids; it must hold their offsets, id - index"]
    problems = []
    outside = int(((ids < 0) | (ids >= vocab_size)).sum())
    if outside:
        problems.append(f"{D2T} points outside the vocabulary of {vocab_size} {outside} times")
    if bool((ids.diff() <= 0).any()):
        problems.append(f"{D2T} + index does not increase; ids must be sorted and distinct")
    if drafted is not None and len(drafted) != count:
        problems.append(f"{T2D} marks {len(drafted)} tokens, {D2T} names {count}")
    elif drafted is not None and not torch.equal(drafted, ids):
        wrong = int((drafted != ids).sum())
        problems.append(f"{T2D} and {D2T} disagree about {wrong} of {count} tokens")
    return problems
