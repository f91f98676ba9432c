"""verify on a CPU: walk first, pick only where the walk arrives.

On a device every node is picked at once, because the host may not look. On a CPU it may, so a step
costs as many picks as it emits tokens, not as many as it verified nodes: at temperature 1 that is
two or three instead of seventeen. The verdict is that of `verify_device`.

Letters: B rows, N nodes a tree, T selected nodes, A path length, V vocabulary, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.tree import NOT_FINITE, DraftTree, Selection, Verdict
from paceline.sample import options as opt
from paceline.sample.rowwise import argmax, draw, score
from paceline.sample.sampler import CHUNK, Head

if TYPE_CHECKING:
    from paceline.core.request import Grammar
    from paceline.sample.options import SamplingTable


def verify_host(
    tree: DraftTree,
    selection: Selection,
    hidden: Tensor,
    head: Head,
    table: SamplingTable,
    rows: Tensor,
    lens: Tensor,
    allowed: Tensor | None = None,
    grammars: Sequence[Grammar | None] = (),
) -> Verdict:
    """`verify` for CPU tensors; arguments as there. A is the deepest selected node's depth + 1.

    A row's grammar goes along: its mask is made where the walk arrives, and nowhere else.
    """
    batch, width = tree.token_ids.shape
    cu_q: list[int] = selection.cu_q.tolist()
    row_ids: list[int] = rows.tolist()
    cached: list[int] = lens.tolist()
    live: list[bool] = table.live[rows].tolist()
    node = selection.node[: cu_q[-1]]
    tokens: list[int] = tree.token_ids.flatten()[node].tolist()
    parents = _parent_places(tree, node) if width > 1 else [-1] * len(tokens)
    levels = 1 + (int(tree.depths.flatten()[node].max()) if width > 1 and tokens else 0)
    scores = _Scores(batch, levels, table, row_ids)

    paths: list[list[int]] = [[] for _ in range(batch)]
    next_token: list[int] = tree.token_ids[:, 0].tolist()
    alive = [False] * batch
    for some in _groups(cu_q):
        start = cu_q[some.start]
        if cu_q[some.stop] == start:
            continue
        logits = head(hidden[start : cu_q[some.stop]]).detach()
        for b in some:
            first, past = cu_q[b], cu_q[b + 1]
            if not live[b] or past == first:
                continue
            options = table.host(row_ids[b])
            grammar = grammars[b] if grammars else None
            bits = None
            plain = not options.flags & opt.PROCESSING and allowed is None and grammar is None
            children = _children(tokens, parents, first, past)
            at, path = first, paths[b]
            below: list[int] = []
            while True:
                path.append(at - first)
                position = cached[b] + len(path)  # of the token this node emits
                if plain:
                    token = argmax(logits[at - start])
                else:
                    if grammar is not None:
                        bits = torch.frombuffer(bytearray(grammar.mask()), dtype=torch.int32)
                    elif allowed is not None:
                        bits = allowed[at]
                    token = draw(
                        logits[at - start],
                        row=row_ids[b],
                        position=position,
                        num_output=position - options.prompt_len,
                        path_tokens=below,
                        allowed=bits,
                        table=table,
                    )
                if token == NOT_FINITE:
                    break
                if options.num_logprobs >= 0:
                    scores.add(b, len(path) - 1, logits[at - start], token)
                if token in options.stop_ids or position + 1 >= options.limit:
                    break
                found = children.get((at, token))
                if found is None or (grammar is not None and not grammar.advance(token)):
                    alive[b] = True
                    break
                below.append(token)
                at = found
            if grammar is not None:
                grammar.rollback(len(below))
            next_token[b] = token
    return Verdict(
        path=_matrix(paths, levels),
        path_tokens=_matrix(
            [[tokens[cu_q[b] + i] for i in path] for b, path in enumerate(paths)], levels
        ),
        count=torch.tensor([len(p) for p in paths], dtype=torch.int64),
        next_token=torch.tensor(next_token, dtype=torch.int64),
        alive=torch.tensor(alive, dtype=torch.bool),
        logprobs=scores.logprobs,
        top_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
    )


class _Scores:
    """Log-probabilities of emitted tokens, filled in while walking; None where nobody asks."""

    def __init__(self, batch: int, levels: int, table: SamplingTable, row_ids: list[int]) -> None:
        self.logprobs: Tensor | None = None
        self.top_ids: Tensor | None = None
        self.top_logprobs: Tensor | None = None
        num_top = table.num_logprobs(row_ids)
        if num_top >= 0:
            shape = (batch, levels, min(num_top, table.vocab_size))
            self.logprobs = torch.full(shape[:2], torch.nan)
            self.top_ids = torch.full(shape, -1, dtype=torch.int64)
            self.top_logprobs = torch.full(shape, torch.nan)

    def add(self, b: int, level: int, logits: Tensor, token: int) -> None:
        """Score the token that row b emits at a level of its path; logits [V] are unprocessed."""
        assert self.logprobs is not None, "a row asks for log-probabilities, so there is room"
        assert self.top_ids is not None, "allocated together"
        assert self.top_logprobs is not None, "allocated together"
        if self.logprobs.dtype != logits.dtype:  # known only once the head has run
            self.logprobs = self.logprobs.to(logits.dtype)
            self.top_logprobs = self.top_logprobs.to(logits.dtype)
        num_top = self.top_ids.shape[2]
        logprob, top_ids, top_logprobs = score(logits, token, num_top)
        self.logprobs[b, level] = logprob
        self.top_ids[b, level] = top_ids
        self.top_logprobs[b, level] = top_logprobs


def _parent_places(tree: DraftTree, node: Tensor) -> list[int]:
    """Flat index, among the selected nodes [T], of each one's parent; -1 for roots."""
    width = tree.token_ids.shape[1]
    flat: list[int] = node.tolist()
    parents: list[int] = tree.parents.flatten()[node].tolist()
    place = {n: t for t, n in enumerate(flat)}
    return [place[n - n % width + p] if p >= 0 else -1 for n, p in zip(flat, parents, strict=True)]


def _children(
    tokens: list[int], parents: list[int], first: int, past: int
) -> dict[tuple[int, int], int]:
    """(parent, token) -> child for one row's nodes; of equal siblings the first one."""
    children: dict[tuple[int, int], int] = {}
    for t in range(first + 1, past):
        children.setdefault((parents[t], tokens[t]), t)
    return children


def _groups(cu_q: Sequence[int]) -> Iterator[range]:
    """Runs of rows with at most CHUNK nodes together, so that few logits exist at a time."""
    start = 0
    for b in range(1, len(cu_q)):
        if b == len(cu_q) - 1 or cu_q[b + 1] - cu_q[start] > CHUNK:
            yield range(start, b)
            start = b


def _matrix(rows: list[list[int]], width: int) -> Tensor:
    """Lists of different lengths as [B, width] int64, -1 padded."""
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64).view(len(rows), width)
