"""A tree that grows level by level: EAGLE-2's and EAGLE-3's dynamic draft tree (arXiv 2406.16858, 4.1).

Every node that is looked at has `width` children, its best candidates. Of a level's children the `width`
best, by the survival of their paths, are looked at next; of all children of all levels the best are
proposed. A chain is a tree of width 1.

The network's keys of the nodes that are looked at lie behind the row's own, level by level, and a node
sees those of its own path:

    width 2     keys    a b | c d | ...          a, b: the root's children; c, d: the best of theirs
    c under a   sees    1 0   1 0

Fixed shapes, and no value is read by the host.

Letters: B rows, k nodes of a level, C candidates, W mask words, M all children.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.tree import NEG_INF, DraftTree, num_words
from paceline.draft.candidates import Candidates
from paceline.ops.reference.growth import best_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The nodes of one depth that are looked at, best first. Of depth 0: the root."""

    tokens: Tensor  # [B, k] int64
    parents: Tensor  # [B, k] int64 which node of the level above
    scores: Tensor  # [B, k] log survival of the path
    spine: Tensor  # [B, k] bool: every token of the path was its parent's best candidate
    mask: Tensor  # [B, k, W] int64 bits over the keys of all levels from 1: its path's, itself included
    places: Tensor  # [B, k] int64 place among the root and all children


class Growth:
    """One tree per row, on its way.

    Args:
        roots: [B] int64 newest tokens.
        width: k, children of a node and nodes of a level.
        depth: levels at most.
    """

    def __init__(self, roots: Tensor, width: int, depth: int) -> None:
        self._width = width
        self._depth = depth
        rows, words = roots.shape[0], num_words(max(1, (depth - 1) * width))
        zeros = torch.zeros(rows, 1, dtype=torch.int64, device=roots.device)
        root = Level(
            tokens=roots.view(-1, 1),
            parents=zeros,
            scores=torch.zeros(rows, 1, dtype=torch.float32, device=roots.device),
            spine=torch.ones_like(zeros, dtype=torch.bool),
            mask=torch.zeros(rows, 1, words, dtype=torch.int64, device=roots.device),
            places=zeros,
        )
        self.levels = [root]
        # Of the root and all children so far: token, score, and place of the parent (the root's: none).
        self._tokens, self._scores, self._above = [root.tokens], [root.scores], [zeros - 1]
        self._size = 1

    def grow(self, found: Candidates) -> Level:
        """Add a level's children; return those that are looked at next.

        Args:
            found: [B, k, C] candidates of the newest level's nodes, C >= k.
        """
        level, width = self.levels[-1], self._width
        gains = torch.where(level.spine.unsqueeze(2), found.weights, found.off_spine)[:, :, :width]
        gains = gains.nan_to_num(nan=NEG_INF, neginf=NEG_INF).clamp(max=0.0)
        tokens = found.ids[:, :, :width].flatten(1)
        scores = (level.scores.unsqueeze(2) + gains).flatten(1)
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._above.append(level.places.repeat_interleave(width, dim=1))
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :width]
        parents = order.div(width, rounding_mode="floor")
        above = parents.unsqueeze(2).expand(-1, -1, level.mask.shape[2])
        grown = Level(
            tokens=tokens.gather(1, order),
            parents=parents,
            scores=scores.gather(1, order),
            spine=level.spine.gather(1, parents) & (order % width == 0),
            mask=level.mask.gather(1, above) | self._own_bits(level.mask),
            places=self._size + order,
        )
        self.levels.append(grown)
        self._size += tokens.shape[1]
        return grown

    def tree(self, count: int, source: int) -> DraftTree:
        """The `count` best children, as a tree.

        Args:
            count: nodes besides the root.
            source: which drafter proposes them.
        """
        above = torch.cat(self._above, dim=1)
        nothing = above.new_full((above.shape[0], 1), self._size)
        above = torch.cat((torch.where(above < 0, self._size, above), nothing), dim=1)
        path = [torch.arange(self._size, device=above.device).expand(above.shape[0], -1)]
        for _ in range(self._depth):
            path.append(above.gather(1, path[-1]))
        return best_nodes(
            torch.cat(self._tokens, dim=1),
            torch.cat(self._scores, dim=1),
            torch.stack(path[::-1], dim=2),
            count,
            source,
        )

    def _own_bits(self, like: Tensor) -> Tensor:
        """[k, W] the bit of each node of the next level: of its own key."""
        place = (len(self.levels) - 1) * self._width + torch.arange(self._width, device=like.device)
        words = torch.arange(like.shape[2], device=like.device)
        here = place.div(_WORD, rounding_mode="floor").unsqueeze(1) == words
        return torch.where(here, 1 << (place % _WORD).unsqueeze(1), 0)


def num_children(width: int, depth: int) -> int:
    """M: children that a growth looks at; more cannot be proposed."""
    return width + max(0, depth - 1) * width**2 if depth else 0


def along(
    levels: Sequence[Level], found: Sequence[Candidates], emitted: Tensor
) -> tuple[Candidates, Tensor]:
    """What was found for the nodes that the target then walked through.

    Args:
        levels: from the root's; one more than needed is allowed.
        found: candidates [B, k, C] of each level's nodes.
        emitted: [B, P] int64 tokens that the target emitted, -1 where it emitted less; P levels.

    Returns:
        Candidates [B, P, C], and `emitted` with -1 where the node before was not looked at.
    """
    here = torch.zeros_like(emitted[:, 0])
    walked = torch.ones_like(here, dtype=torch.bool)
    parts, judged = [], []
    for depth, candidates in enumerate(found):
        if depth:
            level = levels[depth]
            token = emitted[:, depth - 1]
            match = (level.parents == here.unsqueeze(1)) & (level.tokens == token.unsqueeze(1))
            walked = walked & match.any(1)
            here = match.to(torch.int64).argmax(1)
        parts.append(
            {f.name: _taken(getattr(candidates, f.name), here) for f in fields(Candidates)}
        )
        judged.append(torch.where(walked, emitted[:, depth], -1))
    joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    return Candidates(**joined), torch.stack(judged, dim=1)


def _taken(values: Tensor, at: Tensor) -> Tensor:
    """One node of each row: [B, k, ...] at [B] to [B, 1, ...]."""
    index = at.view(-1, *[1] * (values.dim() - 1))
    return values.gather(1, index.expand(-1, 1, *values.shape[2:]))
