"""How a dimension of a network grows without changing what the network computes.

Net2Net's widening (Chen, Goodfellow, Shlens; arXiv 1511.05641): every new index copies an old one. Where
a tensor *writes* the dimension, its rows are copied; where one *reads* it, each copy carries a share of
the old column, and the shares of an index sum to 1. Shares are powers of two, so in binary floating point
a matrix is divided without rounding. An index may also copy nothing: it is *silent*, always 0, and what
reads it may hold any numbers.

    old [a b c]   new [a b c a b c a -]     shares of a: 1/2 1/4 1/4     of b, c: 1/2 1/2

An RMSNorm over such a dimension sees the mean square that the old one saw, times the live share r of the
indices. With no silent index, and every old one copied as often, r is 1 and nothing about it changes.

Letters: n new indices, m old ones.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SILENT = -1


def shares(count: int) -> list[float]:
    """Return `count` powers of two that sum to 1, as equal as can be: 7 are 1/4 and six times 1/8."""
    exponent = (count - 1).bit_length()
    larger = 2**exponent - count
    return [2.0 ** (1 - exponent)] * larger + [2.0**-exponent] * (count - larger)


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """What each index of a grown dimension copies."""

    source: Tensor  # [n] int64: old index, or SILENT
    share: Tensor  # [n] float64: of the old index's weight where it is read; 0 for silent ones
    old: int  # m

    @staticmethod
    def of(source: Sequence[int], old: int) -> Axis:
        """The axis on which index i copies `source[i]`; every old index must be among them."""
        counts = Counter(source)
        assert all(counts[i] for i in range(old)), "an old index would be lost"
        left = {i: shares(counts[i]) for i in range(old)}
        share = [0.0 if i == SILENT else left[i].pop() for i in source]
        return Axis(torch.tensor(source), torch.tensor(share, dtype=torch.float64), old)

    @staticmethod
    def tiled(old: int, new: int, copies: int | None = None) -> Axis:
        """All old indices in order, so many times; what is left is silent.

        Args:
            old: m.
            new: n.
            copies: default: again and again up to the end, the last time perhaps not whole.
        """
        live = new if copies is None else copies * old
        return Axis.of([i % old if i < live else SILENT for i in range(new)], old)

    @property
    def new(self) -> int:
        """The number of indices, n."""
        return self.source.shape[0]

    @property
    def num_silent(self) -> int:
        """Indices that copy nothing."""
        return int((self.source == SILENT).sum())

    @property
    def live_share(self) -> float:
        """The share r of indices that are not silent."""
        return 1.0 - self.num_silent / self.new

    def blocks(self, size: int) -> Axis:
        """The same for blocks of `size` indices: heads become the rows of heads."""
        inside = torch.arange(size)
        source = (self.source[:, None] * size + inside).flatten()
        silent = (self.source == SILENT).repeat_interleave(size)
        return Axis(
            source.masked_fill(silent, SILENT),
            self.share.repeat_interleave(size),
            self.old * size,
        )

    def repeated(self, times: int) -> Axis:
        """Several dimensions one after the other, each grown like this one."""
        start = (torch.arange(times) * self.old).repeat_interleave(self.new)
        source = self.source.repeat(times)
        moved = torch.where(source == SILENT, source, source + start)
        return Axis(moved, self.share.repeat(times), self.old * times)

    def copied(self, tensor: Tensor, dim: int) -> Tensor:
        """Grow a dimension of what writes it; 0 at silent indices."""
        source = self.source.to(tensor.device)
        found = tensor.index_select(dim, source.clamp(min=0))
        if self.num_silent:
            found.index_fill_(dim, (source == SILENT).nonzero().squeeze(1), 0)
        return found

    def shared(self, matrix: Tensor, noise: torch.Generator) -> Tensor:
        """Grow the columns of what reads it, [..., m] to [..., n].

        Args:
            matrix: [..., m].
            noise: fills the columns of silent indices, with the deviation that the matrix has.
        """
        source = self.source.to(matrix.device)
        found = matrix.index_select(-1, source.clamp(min=0))
        found.mul_(self.share.to(matrix.device, matrix.dtype))
        if self.num_silent:
            at = (source == SILENT).nonzero().squeeze(1)
            # Drawn on the CPU: the same numbers on every device.
            drawn = torch.randn(*matrix.shape[:-1], len(at), generator=noise).to(matrix.device)
            found[..., at] = (drawn * matrix.float().std()).to(matrix.dtype)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an old tensor becomes a new one; the empty recipe leaves it as it is."""

    copied: Mapping[int, Axis] = field(default_factory=dict)  # dimensions that it writes
    shared: Axis | None = None  # of the last dimension, which it reads
    gain: float = 1.0  # of a norm's weight
    zero: bool = False  # whatever it was, it adds nothing now

    def shape(self, old: Sequence[int]) -> tuple[int, ...]:
        """The new tensor's shape.

        Args:
            old: the old one's.
        """
        new = list(old)
        for dim, axis in self.grown(len(new)):
            assert new[dim] == axis.old, "the axis is of another size"
            new[dim] = axis.new
        return tuple(new)

    def grown(self, num_dims: int) -> list[tuple[int, Axis]]:
        """Every dimension that grows."""
        reads = [] if self.shared is None else [(num_dims - 1, self.shared)]
        return [*self.copied.items(), *reads]

    def num_zeros(self, old: Sequence[int]) -> int:
        """How many numbers of the new tensor are 0 by construction."""
        size = math.prod(self.shape(old))
        live = 0.0 if self.zero else math.prod(axis.live_share for axis in self.copied.values())
        return round(size * (1 - live))

    def make(self, tensor: Tensor, dtype: torch.dtype, key: str) -> Tensor:
        """Make the new tensor in `dtype`, on the old one's device; whole numbers keep theirs.

        Args:
            tensor: the old one.
            dtype: of the new one.
            key: what random numbers are drawn for: the same key, the same numbers.
        """
        if self.zero:
            return torch.zeros(self.shape(tensor.shape), dtype=dtype, device=tensor.device)
        if not tensor.is_floating_point():
            return tensor
        if self.gain != 1.0:  # rounded once
            tensor = tensor.double() * self.gain
        found = tensor.to(dtype)
        if (
            self.shared is not None
        ):  # first, while there are few rows: columns are gathered one by one
            noise = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            found = self.shared.shared(found, noise)
        for dim, axis in self.copied.items():
            found = axis.copied(found, dim)
        return found


def norm(axis: Axis) -> Recipe:
    """The weight of an RMSNorm over a grown dimension; its epsilon is to be multiplied by r."""
    return Recipe(copied={0: axis}, gain=math.sqrt(axis.live_share))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAxes:
    """The dimensions of a pre-norm layer."""

    stream: Axis  # the residual stream
    queries: Axis  # rows of q_proj
    keys: Axis  # rows of k_proj and v_proj
    neurons: Axis

    @staticmethod
    def of(
        stream: Axis, heads: tuple[int, int], grown: tuple[int, int], dim: int, neurons: Axis
    ) -> LayerAxes:
        """Grow heads so that every copy of a query reads a copy of its own key/value head.

        New key/value heads copy the old ones in turn. Each takes along its old queries, and, where the
        new group is larger, some of them again.

        Args:
            stream: the residual stream.
            heads: old query and key/value heads.
            grown: new ones; no fewer of each, and no smaller a group.
            dim: the size of a head, which stays.
            neurons: the feed-forward block's.
        """
        (queries, keys), (new_queries, new_keys) = heads, grown
        group, new_group = queries // keys, new_queries // new_keys
        chosen = [
            (head % keys) * group + (slot if slot < group else slot + head // keys) % group
            for head in range(new_keys)
            for slot in range(new_group)
        ]
        return LayerAxes(
            stream=stream,
            queries=Axis.of(chosen, queries).blocks(dim),
            keys=Axis.tiled(keys, new_keys).blocks(dim),
            neurons=neurons,
        )

    def recipes(self, inputs: Axis | None = None) -> dict[str, Recipe]:
        """What becomes of a layer's tensors, by the end of their Hugging Face names.

        Args:
            inputs: what queries, keys and values read; default: the stream.
        """
        reads = self.stream if inputs is None else inputs
        found = {
            "input_layernorm.weight": norm(self.stream),
            "post_attention_layernorm.weight": norm(self.stream),
            "self_attn.q_norm.weight": Recipe(),
            "self_attn.k_norm.weight": Recipe(),
        }
        for name, rows, columns in (
            ("self_attn.q_proj", self.queries, reads),
            ("self_attn.k_proj", self.keys, reads),
            ("self_attn.v_proj", self.keys, reads),
            ("self_attn.o_proj", self.stream, self.queries),
            ("mlp.gate_proj", self.neurons, self.stream),
            ("mlp.up_proj", self.neurons, self.stream),
            ("mlp.down_proj", self.stream, self.neurons),
        ):
            found[f"{name}.weight"] = Recipe(copied={0: rows}, shared=columns)
            found[f"{name}.bias"] = Recipe(copied={0: rows})
        return found
