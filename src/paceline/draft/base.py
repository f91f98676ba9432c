"""The drafter protocols: what a drafter is told, what it returns, and its facts.

Two kinds, told apart by the registry that names them and never by `isinstance`: a *host* drafter (n-gram, suffix)
works on lists of ints; a *device* drafter (a network) works on tensors inside the step. No drafter
knows scheduling, graphs, pages or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.core.batch import Attend, ForwardBatch, ForwardOutput
    from paceline.core.config import ModelConfig
    from paceline.core.tree import DraftTree, Proposal
    from paceline.layers.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftKV:
    """What a drafter network caches per token: the engine sizes and owns the pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """Facts about a drafter; no code."""

    name: str
    max_nodes: int  # N: most nodes of a tree, root included
    max_depth: int  # A - 1: most draft tokens on a path
    on_host: bool
    parts: tuple[str, ...] = ()  # of several in one: names that a request may choose from
    # What its nodes have in `DraftTree.sources` -> where such a token came from, in a word for people.
    sources: Mapping[int, str] = field(default_factory=dict)
    source: int = 0  # of a network: its one number there
    aux_layers: tuple[int, ...] = ()  # target layers whose output is tapped
    kv: DraftKV | None = None  # None: no cache of its own
    lookahead: int = 0  # later tokens that a cache entry depends on (EAGLE-3: 1)
    scratch: int = 0  # most tail slots that `propose` uses in the draft pool
    mean_nodes: int | None = None  # most on average over the rows of a step; None: max_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a target pass made final; same type after prefill and after verify. T flat entries."""

    rows: Tensor  # [B] int64
    cu: Tensor  # [B+1] int64 cumulative counts; entries past cu[B] are dead (slot -1)
    token_ids: Tensor  # [T] int64
    next_ids: Tensor  # [T] int64 the token after each
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    hidden: Tensor | None  # [T, F] tapped residual streams, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommit:
    """What became final for the rows of a step, as lists: tokens emitted, oldest first."""

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a drafter network may use of its target: facts, the embedding and the head."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    embed: Callable[[Tensor], Tensor]  # ids [T] int64 -> [T, H]
    head: Callable[[Tensor], Tensor]  # hidden [M, H] after a final norm -> logits [M, V]
    weights: Literal["8bit", "bf16"] = "bf16"  # how a CPU keeps the network's own matrices


class DraftNet(Protocol):
    """A drafter's network: called like a model (`models.base.CausalLM`)."""

    def __call__(
        self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """One pass over T tokens."""
        ...

    def decoder(self) -> Decoder | str:
        """The network's parts for a pass in one call; or, as a clause, why its pass is another."""
        ...


class DraftRuntime(Protocol):
    """What the engine lends a drafter network: its pool, its pages, the rows' state."""

    @property
    def num_rows(self) -> int:
        """R: rows are 0 ... R - 1. Row R is for padding: what is kept for it is nobody's."""
        ...

    def lens(self, rows: Tensor) -> Tensor:
        """[B] int64 tokens cached by the target, and so by the drafter, for rows [B]."""
        ...

    def next_token(self, rows: Tensor) -> Tensor:
        """[B] int64 picked but uncached token of rows [B]: the root of the next tree."""
        ...

    def block(self, rows: Tensor, token_ids: Tensor, mask: Tensor) -> ForwardBatch:
        """A BLOCK pass of q queries per row at cache places lens ... lens + q - 1 (scratch).

        Args:
            rows: [B] int64.
            token_ids: [B, q] int64.
            mask: [q, W] int64 visibility bits over the row's own q tail keys, the same for all.
        """
        ...

    def newest(self, rows: Tensor, token_ids: Tensor, features: Tensor) -> ForwardBatch:
        """A BLOCK pass of one query per row at its newest cached place, lens - 1; nothing is written.

        Args:
            rows: [B] int64.
            token_ids: [B] int64, of the entry that is cached there.
            features: [B, H], of the same.
        """
        ...

    def level(
        self, rows: Tensor, token_ids: Tensor, features: Tensor, mask: Tensor, depth: int
    ) -> ForwardBatch:
        """A BLOCK pass over one level of a growing tree, q nodes per row: tail keys of all levels so far.

        Level d lies at cache places lens + (d - 1) * q ... (scratch), all at position lens + d - 1.

        Args:
            rows: [B] int64.
            token_ids: [B, q] int64.
            features: [B, q, H].
            mask: [B, q, W] int64 visibility bits over the row's own depth * q tail keys.
            depth: d, from 1.
        """
        ...

    def forward(self, net: DraftNet, batch: ForwardBatch) -> ForwardOutput:
        """Run the network over the drafter's own pool."""
        ...

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, Hkv, D] of final tokens at `slots` [T] (-1: nothing)."""
        ...

    def write_context(
        self,
        product: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        gains: Tensor,
        eps: float,
    ) -> None:
        """Store keys, normed and rotated, and values of final tokens in all layers.

        Args:
            product: [T, L * 2 * Hkv * D]: of each layer keys, then values.
            positions: [T] int64 rows of `cos_sin`.
            slots: [T] (-1: nothing).
            cos_sin: [P, D] rotary table.
            gains: [L, D] weights of the norms of keys.
            eps: of the norms.
        """
        ...

    def noise(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Keyed Gumbel noise [B, n] of tokens [B, n] to be emitted at positions [B].

        The same that the target's pick adds at that position; 0 for rows at temperature 0.
        """
        ...

    def noise_ahead(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """`noise` of tokens [B, P, C] to be emitted at the first P positions after the roots of rows [B]."""
        ...

    def temperature(self, rows: Tensor) -> Tensor:
        """[B] float; 0 for greedy rows."""
        ...


class Drafter(Protocol):
    """A drafter that runs on the device."""

    spec: DrafterSpec

    def attach(self, runtime: DraftRuntime) -> None:
        """Called once by the engine, before anything else."""
        ...

    def observe(self, commit: Commit) -> None:
        """Update the own cache from what became final. Runs in every target pass, for every row."""
        ...

    def propose(self, rows: Tensor) -> DraftTree:
        """Next proposal for these rows ([B] int64)."""
        ...


class HostDrafter(Protocol):
    """A drafter that runs on the host, on token ids alone. One instance serves all rows.

    The text of a row, for a drafter, is its prompt and all emitted tokens including the newest
    (the root of the next tree), which the target's cache does not hold yet.
    """

    spec: DrafterSpec

    def join(self, row: int, tokens: Sequence[int], num_prompt: int, scope: str) -> None:
        """A request takes `row`. `tokens` is its text so far; the first `num_prompt` are prompt.

        A resumed request joins with the tokens that it had emitted before. `scope` separates
        tenants: nothing learned in one scope may be proposed in another.
        """
        ...

    def observe(self, commit: HostCommit) -> None:
        """Append what the rows emitted in this step. Amortised constant time per token."""
        ...

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:
        """One proposal per row of at most `budgets[i]` nodes; empty where nothing matches."""
        ...

    def leave(self, row: int, *, keep: bool) -> None:
        """The row is free again.

        `keep`: the request finished, so its output may be learned from; False for an abort or a
        preemption.
        """
        ...
