"""DraftTree, Selection and Verdict: the one currency for proposals and their outcome.

Letters: B rows, N nodes per tree (root included), A = maximum depth + 1, T selected nodes,
W = ceil(N / 64) words of ancestor bits.

A chain is a thin tree; plain autoregressive decoding is a tree of one node. Node 0 is the root: the
row's `next_token`, already emitted, not yet in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_WORD = 64
NEG_INF = float("-inf")
NOT_FINITE = -2  # in place of a token: no token can be chosen, see `Verdict`
FORCED = 6  # in `sources`: the request's grammar proposed the node, no drafter did


def num_words(num_nodes: int) -> int:
    """Words of 64 ancestor bits that `num_nodes` nodes need."""
    return -(-num_nodes // _WORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """One proposal for every row of a step. Frozen; padding nodes match nothing.

    Parents precede children. Siblings may not be told apart by anything but their token; among
    equal siblings the walk takes the lowest index.
    """

    token_ids: Tensor  # [B, N] int64; node 0 is the root
    parents: Tensor  # [B, N] int64; parent index < own index; -1 at the root and for padding
    depths: Tensor  # [B, N] int64; position = lens + depth
    mask: Tensor  # [B, N, W] int64 ancestor bits, itself included
    scores: Tensor  # [B, N] float32 log survival estimate of the path; 0 at the root; -inf padding
    sources: Tensor  # [B, N] int8: which drafter proposed the node (0: the root)
    num_nodes: Tensor  # [B] int64 real nodes

    def to(self, device: torch.device) -> DraftTree:
        """The same tree on another device."""
        return DraftTree(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def check(self) -> None:
        """Assert every invariant of the class docstring; reads the device. For tests."""
        rows, width = self.token_ids.shape
        words = num_words(width)
        for name, shape, dtype in (
            ("token_ids", (rows, width), torch.int64),
            ("parents", (rows, width), torch.int64),
            ("depths", (rows, width), torch.int64),
            ("mask", (rows, width, words), torch.int64),
            ("scores", (rows, width), torch.float32),
            ("sources", (rows, width), torch.int8),
            ("num_nodes", (rows,), torch.int64),
        ):
            tensor: Tensor = getattr(self, name)
            assert tuple(tensor.shape) == shape, f"{name} must be {shape}"
            assert tensor.dtype == dtype, f"{name} must be {dtype}"
        for b, n in enumerate(self.num_nodes.tolist()):
            assert 1 <= n <= width, "a tree has a root and at most N nodes"
            tokens, parents, depths, masks, scores = (
                x[b].tolist()
                for x in (self.token_ids, self.parents, self.depths, self.mask, self.scores)
            )
            assert (parents[0], depths[0], scores[0]) == (-1, 0, 0), "node 0 is the root"
            assert min(tokens[:n]) >= 0, "a node has a token"
            assert set(scores[n:]) <= {NEG_INF}, "padding must score -inf"
            bits = [1]
            for i in range(1, n):
                parent = parents[i]
                assert 0 <= parent < i, "parents precede children"
                assert depths[i] == depths[parent] + 1, "a child is one deeper than its parent"
                assert scores[i] <= scores[parent], "a child may not score above its parent"
                bits.append(bits[parent] | 1 << i)
            have = [sum(w % (1 << _WORD) << (_WORD * j) for j, w in enumerate(m)) for m in masks]
            assert have[:n] == bits, "mask must be the ancestor bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which nodes are verified: closed under parents, rows in order, nodes in tree order.

    Selected node t of row b has cache place `lens + (t - cu_q[b])` and position `lens + depth`.
    """

    node: Tensor  # [T] int64 flat index b * N + n
    cu_q: Tensor  # [B+1] int64
    mask: Tensor  # [T, W] int64: the tree's bits renumbered to the selected nodes of the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the target said. Emitted by row b: the tokens of path[1:count], then next_token.

    Where the logits of the path's last node hold a NaN or an infinity above all else, or nothing but
    -inf after the row's masks, `next_token` is NOT_FINITE: the row emits no more and is not alive.
    """

    path: Tensor  # [B, A] int64 accepted nodes as *selected indices within the row*, -1 padded
    path_tokens: Tensor  # [B, A] int64 tokens of the path (root first), -1 padded
    count: Tensor  # [B] int64 accepted nodes, root included; 0 for a row that is not live
    next_token: Tensor  # [B] int64
    alive: Tensor  # [B] bool: the row goes on after this step (no stop id, limit not reached)
    logprobs: Tensor | None = None  # [B, A] float32 of each emitted token, unprocessed logits
    top_ids: Tensor | None = None  # [B, A, K] int64
    top_logprobs: Tensor | None = None  # [B, A, K] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A host drafter's tree for one row, root excluded: plain lists.

    `parents[i]` is the index of another proposed node below i, or -1 for a child of the root.
    `scores[i]` is the log survival estimate of the path to node i, never above its parent's.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    scores: Sequence[float] = ()
    sources: Sequence[int] = ()


EMPTY = Proposal()


def root(next_tokens: Tensor) -> DraftTree:
    """The tree of plain decoding: one node per row. `next_tokens` is [B].

    All that is constant are views of three numbers: on a GPU one kernel makes them, not one each.
    """
    rows = next_tokens.shape[0]
    below, nothing, one = torch.arange(-1, 2, device=next_tokens.device).view(3, 1).unbind()
    return DraftTree(
        token_ids=next_tokens.to(torch.int64).view(rows, 1),
        parents=below.expand(rows, 1),
        depths=nothing.expand(rows, 1),
        mask=one.expand(rows, 1, 1),
        scores=nothing.view(torch.float32)[:1].expand(rows, 1),  # zero bits are zero in any type
        sources=nothing.view(torch.int8)[:1].expand(rows, 1),
        num_nodes=one.expand(rows),
    )


def chain(token_ids: Tensor, scores: Tensor, source: int) -> DraftTree:
    """A chain per row, made on the device of its tokens.

    Args:
        token_ids: [B, N] int64, the root first.
        scores: [B, N] log survival estimates, 0 at the root, not increasing along a row.
        source: which drafter proposes it.
    """
    width = token_ids.shape[1]
    return chain_like(straight(width, source, token_ids.device), token_ids, scores)


def chain_like(shape: DraftTree, token_ids: Tensor, scores: Tensor) -> DraftTree:
    """`chain` in the shape that `straight` made once: nothing but tokens and scores is new."""
    rows = token_ids.shape[0]
    return DraftTree(
        token_ids=token_ids,
        parents=shape.parents.expand(rows, -1),
        depths=shape.depths.expand(rows, -1),
        mask=shape.mask.expand(rows, -1, -1),
        scores=scores.to(torch.float32),
        sources=shape.sources.expand(rows, -1),
        num_nodes=shape.num_nodes.expand(rows),
    )


def straight(width: int, source: int, device: torch.device) -> DraftTree:
    """The shape of a chain of `width` nodes, root included, for one row; without tokens and scores."""
    place = torch.arange(width, device=device)
    return DraftTree(
        token_ids=torch.full((1, width), -1, dtype=torch.int64, device=device),
        parents=(place - 1).unsqueeze(0),
        depths=place.unsqueeze(0),
        mask=prefix_bits(place + 1, width).unsqueeze(0),
        scores=torch.zeros(1, width, device=device),
        sources=((place > 0).to(torch.int8) * source).unsqueeze(0),
        num_nodes=torch.full((1,), width, dtype=torch.int64, device=device),
    )


def prefix_bits(counts: Tensor, width: int) -> Tensor:
    """Masks with the lowest bits set: counts [n] int64 in 0 ... width -> [n, W] int64."""
    start = _WORD * torch.arange(num_words(width), device=counts.device)
    here = (counts.unsqueeze(1) - start).clamp(0, _WORD)
    # Shifting by all 64 bits is undefined: full words are -1, and shift by 63 at most.
    return torch.where(here == _WORD, -1, (1 << here.clamp(max=_WORD - 1)) - 1)


def from_proposals(roots: Sequence[int], proposals: Sequence[Proposal]) -> DraftTree:
    """Build a DraftTree on the CPU from host lists; N is the largest proposal's size + 1.

    Args:
        roots: the rows' next tokens.
        proposals: one per row, in the same order.
    """
    width = 1 + max((len(p.tokens) for p in proposals), default=0)
    words = num_words(width)
    tokens, parents, depths, masks, scores, sources, counts = [], [], [], [], [], [], []
    for root_token, prop in zip(roots, proposals, strict=True):
        n = len(prop.tokens)
        bits = [1]
        depth = [0]
        for i, p in enumerate(prop.parents):
            bits.append(bits[p + 1] | (1 << (i + 1)))
            depth.append(depth[p + 1] + 1)
        pad = width - 1 - n
        tokens.append([root_token, *prop.tokens] + [-1] * pad)
        parents.append([-1, *(p + 1 for p in prop.parents)] + [-1] * pad)
        depths.append(depth + [0] * pad)
        masks.append([_words(b, words) for b in bits] + [[0] * words] * pad)
        scores.append([0.0, *prop.scores] + [NEG_INF] * pad)
        sources.append([0, *(prop.sources or [1] * n)] + [0] * pad)
        counts.append(n + 1)
    return DraftTree(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int64),
        depths=torch.tensor(depths, dtype=torch.int64),
        mask=torch.tensor(masks, dtype=torch.int64),
        scores=torch.tensor(scores, dtype=torch.float32),
        sources=torch.tensor(sources, dtype=torch.int8),
        num_nodes=torch.tensor(counts, dtype=torch.int64),
    )


def proposals_of(tree: DraftTree) -> list[Proposal]:
    """A tree's nodes as host lists, roots excluded: `from_proposals` read backwards.

    Reads device values; free on a CPU only.
    """
    columns = (tree.token_ids, tree.parents, tree.scores, tree.sources)
    tokens, parents, scores, sources = (x.tolist() for x in columns)
    return [
        Proposal(
            tokens=tokens[b][1:n],
            parents=[p - 1 for p in parents[b][1:n]],
            scores=scores[b][1:n],
            sources=sources[b][1:n],
        )
        for b, n in enumerate(tree.num_nodes.tolist())
    ]


def _words(bits: int, words: int) -> list[int]:
    """Split an arbitrary-size bit set into signed 64-bit words, lowest first."""
    out = []
    for w in range(words):
        word = (bits >> (_WORD * w)) & ((1 << _WORD) - 1)
        out.append(word - (1 << _WORD) if word >> (_WORD - 1) else word)
    return out
