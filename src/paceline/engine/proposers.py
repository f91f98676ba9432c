"""Proposers: host drafters and drafter networks behind one face, for the engine.

A *host* proposer gets token lists after each step and returns lists. A *network* proposer observes
inside the step, from the target's tapped features, and returns trees that live on the device. On a
CPU reading such a tree costs nothing, so its nodes are pruned by the same policy; on a GPU nobody
reads it, and the nodes are selected on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.attention.base import PagedAttend
from paceline.core.batch import ForwardBatch, ForwardMode, ForwardOutput
from paceline.core.tree import EMPTY, DraftTree, Proposal, proposals_of
from paceline.draft.base import Commit, HostCommit
from paceline.sample.noise import gumbel, hash_tokens, noise_words_of

if TYPE_CHECKING:
    from paceline.attention.base import AttentionBackend
    from paceline.draft.base import Drafter, DrafterSpec, DraftNet, HostDrafter
    from paceline.engine.rows import RowTable
    from paceline.engine.sequence import Sequence
    from paceline.kv.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """Either lists (a host can prune them) or a tree that stays on the device."""

    proposals: Seq[Proposal]
    tree: DraftTree | None = None


class Proposer(Protocol):
    """What the engine asks of any drafter."""

    spec: DrafterSpec

    def join(self, sequence: Sequence) -> None:
        """The sequence has just taken its row."""
        ...

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """The sequence is about to lose its row."""
        ...

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:
        """Draft nodes for these rows."""
        ...

    def observe(self, commit: Commit) -> None:
        """What a target pass made final; called inside the step if `observes`."""
        ...

    def tell(self, commit: HostCommit) -> None:
        """What the rows emitted, once the host knows."""
        ...

    @property
    def observes(self) -> bool:
        """Whether `observe` wants to be called."""
        ...


class HostProposer:
    """A `HostDrafter` as a `Proposer`."""

    observes = False

    def __init__(self, drafter: HostDrafter) -> None:
        self._drafter = drafter
        self.spec = drafter.spec

    def join(self, sequence: Sequence) -> None:
        """Give the drafter the row's text so far."""
        self._drafter.join(
            sequence.row, sequence.tokens, sequence.num_prompt, sequence.request.scope
        )

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Let the drafter learn from a finished output."""
        self._drafter.leave(sequence.row, keep=finished)

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:  # noqa: ARG002
        """Lists, one per row."""
        return Proposed(proposals=self._drafter.propose(rows, budgets))

    def observe(self, commit: Commit) -> None:
        """Nothing: the host is told later."""

    def tell(self, commit: HostCommit) -> None:
        """Append what was emitted."""
        self._drafter.observe(commit)


class NetworkProposer:
    """A drafter network as a `Proposer`."""

    observes = True

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.spec = drafter.spec

    def join(self, sequence: Sequence) -> None:
        """Nothing: what a network knows of a row lies in pages."""

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Nothing: as for `join`."""

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:
        """A tree; as lists too where reading it costs nothing."""
        tree = self._drafter.propose(row_ids)
        if not tree.token_ids.is_cpu:
            return Proposed(proposals=(EMPTY,) * len(rows), tree=tree)
        lists = proposals_of(tree)
        return Proposed(
            proposals=[best_nodes(p, budget) for p, budget in zip(lists, budgets, strict=True)]
        )

    def observe(self, commit: Commit) -> None:
        """Update the draft cache."""
        self._drafter.observe(commit)

    def tell(self, commit: HostCommit) -> None:
        """Nothing: the network has observed already."""


class NetworkRuntime:
    """`DraftRuntime`: the draft pool at the target's slot numbers, and the rows' state."""

    def __init__(self, rows: RowTable, pool: KVPool | None, backend: AttentionBackend) -> None:
        self._rows = rows
        self._pool = pool
        self._backend = backend

    @property
    def num_rows(self) -> int:
        """See `DraftRuntime`."""
        return self._rows.lens.shape[0] - 1

    def lens(self, rows: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        return self._rows.lens[rows]

    def next_token(self, rows: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        return self._rows.next_token[rows]

    def temperature(self, rows: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        return self._rows.options.temperature[rows]

    def noise(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        options = self._rows.options
        words = noise_words_of(options.key[rows], positions)
        noise = gumbel(hash_tokens(token_ids.to(torch.int32), words), torch.float32)
        return noise.masked_fill((options.temperature[rows] == 0).unsqueeze(1), 0.0)

    def block(self, rows: Tensor, token_ids: Tensor, mask: Tensor) -> ForwardBatch:
        """See `DraftRuntime`."""
        width, device = token_ids.shape[1], token_ids.device
        places = self._rows.lens[rows].unsqueeze(1) + torch.arange(width, device=device)
        mask = mask.repeat(token_ids.shape[0], 1)
        return self._pass(rows, token_ids, mask=mask, places=places, positions=places, tail=width)

    def newest(self, rows: Tensor, token_ids: Tensor, features: Tensor) -> ForwardBatch:
        """See `DraftRuntime`."""
        places = (self._rows.lens[rows] - 1).clamp(min=0).unsqueeze(1)  # a padding row has none
        mask = torch.ones_like(places)
        batch = self._pass(
            rows, token_ids.unsqueeze(1), mask=mask, places=places, positions=places, tail=1
        )
        # The entry may lie in a page that others share: not even the same bits are written again.
        return replace(batch, features=features, slots=torch.full_like(batch.slots, -1))

    def level(
        self, rows: Tensor, token_ids: Tensor, features: Tensor, mask: Tensor, depth: int
    ) -> ForwardBatch:
        """See `DraftRuntime`."""
        width, device = token_ids.shape[1], token_ids.device
        lens = self._rows.lens[rows].unsqueeze(1)
        first = (depth - 1) * width
        batch = self._pass(
            rows,
            token_ids,
            mask=mask.flatten(0, 1),
            places=lens + torch.arange(first, first + width, device=device),
            positions=(lens + depth - 1).expand(-1, width),
            tail=first + width,
        )
        return replace(batch, features=features.flatten(0, 1))

    def _pass(
        self,
        rows: Tensor,
        token_ids: Tensor,
        *,
        mask: Tensor,
        places: Tensor,
        positions: Tensor,
        tail: int,
    ) -> ForwardBatch:
        """A BLOCK pass over the rows' draft keys; its queries are the last of `tail` keys a row.

        Args:
            rows: [B] int64.
            token_ids: [B, q] int64.
            mask: [B * q, W] int64.
            places: [B, q] int64, consecutive; what lies before the tail is prefix.
            positions: [B, q] int64.
            tail: keys.
        """
        batch, width = token_ids.shape
        prefix_lens = places[:, -1] + 1 - tail
        places = places.reshape(-1)
        return ForwardBatch(
            mode=ForwardMode.BLOCK,
            num_rows=batch,
            q_len=width,
            rows=rows,
            token_ids=token_ids.reshape(-1),
            positions=positions.reshape(-1),
            slots=self._rows.slots(rows.repeat_interleave(width), places),
            prefix_lens=prefix_lens,
            cu_q=torch.arange(batch + 1, device=token_ids.device) * width,
            tail_lens=torch.full_like(prefix_lens, tail),
            mask=mask,
            pages=self._rows.pages.tensor[rows],
        )

    def forward(self, net: DraftNet, batch: ForwardBatch) -> ForwardOutput:
        """See `DraftRuntime`."""
        assert self._pool is not None, "a network without a cache has no paged pass"
        self._backend.plan(batch)
        return net(batch, PagedAttend(self._backend, self._pool, batch))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `DraftRuntime`."""
        assert self._pool is not None, "a network without a cache writes nothing"
        self._pool.write(layer, slots, k, v)


def best_nodes(proposal: Proposal, budget: int) -> Proposal:
    """The `budget` best nodes by score, lowest index first among equals; closed under parents."""
    count = len(proposal.tokens)
    if count <= budget:
        return proposal
    order = sorted(range(count), key=lambda i: (-proposal.scores[i], i))
    kept = sorted(order[:budget])
    index = {old: new for new, old in enumerate(kept)}
    index[-1] = -1
    return Proposal(
        tokens=[proposal.tokens[i] for i in kept],
        parents=[index[proposal.parents[i]] for i in kept],
        scores=[proposal.scores[i] for i in kept],
        sources=[proposal.sources[i] for i in kept] if proposal.sources else (),
    )
