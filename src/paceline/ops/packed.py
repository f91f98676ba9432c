"""Weights that are not plain matrices: quantised groups, and the protocol of packed products.

`Groups` is the neutral form that a loader makes from a file; `pack` turns it, or a plain matrix,
into what multiplies fastest on this machine. What is computed from packed weights is in `ops.cpu`.

Letters: N output features, K input features, Z group size, G = K / Z groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch

from paceline.ops.dispatch import implementation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.core.config import WeightMode

_SIZE = 32  # of the groups that plain matrices are rounded to


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A quantised [N, K] matrix: value = code * scale + min, one scale and min per group of a row.

    Q4_0 is codes 0..15 with min = -8 * scale; Q4_1 is codes 0..15 with its own min; Q8_0 is int8
    codes without a min.
    """

    codes: Tensor  # [N, K] uint8, or int8 for signed codes; one code a byte, whatever `bits`
    scales: Tensor  # [N, G] float16, bfloat16 or float32
    mins: Tensor | None  # [N, G] like scales; None: zero
    size: int  # Z, input features per group
    bits: int  # 4 or 8: how many bits the codes need

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the information: `bits` per code, plus scales and mins."""
        side = self.scales.nbytes + (self.mins.nbytes if self.mins is not None else 0)
        return self.codes.numel() * self.bits // 8 + side

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the [N, K] matrix, computed in float32 (float64 for float64), rounded once."""
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        n, k = self.codes.shape
        value = self.codes.view(n, k // self.size, self.size).to(kind)
        value = value * self.scales.to(kind).unsqueeze(-1)
        if self.mins is not None:
            value = value + self.mins.to(kind).unsqueeze(-1)
        return value.to(dtype).view(n, k)

    def rows(self, ids: Tensor) -> Groups:
        """Return the rows `ids` ([n] int64) as Groups."""
        mins = None if self.mins is None else self.mins[ids]
        return Groups(
            codes=self.codes[ids],
            scales=self.scales[ids],
            mins=mins,
            size=self.size,
            bits=self.bits,
        )

    def permute_rows(self, order: Tensor) -> Groups:
        """Return the same matrix with row i taken from row `order[i]` ([N] int64)."""
        return self.rows(order)

    @staticmethod
    def cat_rows(parts: Sequence[Groups]) -> Groups:
        """Stack matrices of equal K, group size and bits: fused projections.

        Raises:
            ValueError: the parts differ in K, group size, bits or signedness.
        """
        first = parts[0]
        facts = {(p.codes.shape[1], p.size, p.bits, p.codes.dtype) for p in parts}
        if len(facts) != 1:
            msg = f"cannot stack quantised matrices of different kinds: {sorted(map(str, facts))}"
            raise ValueError(msg)
        mins: Tensor | None = None
        if any(p.mins is not None for p in parts):
            mins = torch.cat(
                [p.mins if p.mins is not None else torch.zeros_like(p.scales) for p in parts]
            )
        return Groups(
            codes=torch.cat([p.codes for p in parts]),
            scales=torch.cat([p.scales for p in parts]),
            mins=mins,
            size=first.size,
            bits=first.bits,
        )


def quantize(weight: Tensor, *, bits: int, size: int = 32) -> Groups:
    """Round a plain [N, K] matrix to groups, as GGUF's Q4_1 (4 bits) or Q8_0 (8 bits) do.

    Four bits: codes 0..15 between a group's least and largest value; the error is at most half a
    step, (max - min) / 30, about 7 % of a Gaussian weight's deviation. Eight bits: symmetric,
    absmax / 254 at most, about 0.6 %.

    Raises:
        ValueError: K is no multiple of `size`, or `bits` is not 4 or 8.
    """
    n, k = weight.shape
    if k % size or bits not in (4, 8):
        msg = f"cannot quantise [{n}, {k}] to {bits} bits in groups of {size}"
        raise ValueError(msg)
    w = weight.float().view(n, k // size, size)
    if bits == 4:
        low, high = w.amin(dim=-1), w.amax(dim=-1)
        scales = ((high - low) / 15).to(torch.float16)
        mins = low.to(torch.float16)
        step = scales.float().unsqueeze(-1)
        offset = w - mins.float().unsqueeze(-1)
        codes = (offset / step.where(step > 0, torch.ones_like(step))).round().clamp(0, 15)
        codes = codes.to(torch.uint8)
        return Groups(codes=codes.view(n, k), scales=scales, mins=mins, size=size, bits=4)
    scales = (w.abs().amax(dim=-1) / 127).to(torch.float16)
    step = scales.float().unsqueeze(-1)
    codes = (w / step.where(step > 0, torch.ones_like(step))).round().clamp(-127, 127)
    codes = codes.to(torch.int8)
    return Groups(codes=codes.view(n, k), scales=scales, mins=None, size=size, bits=8)


@runtime_checkable
class PackedWeight(Protocol):
    """A matrix in a layout made for one product; `linear` hands over to it."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix that it stands for."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `rows` and of the activations that it was packed for."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    @property
    def kind(self) -> str:
        """One line for people: representation and implementation."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` ([n] int64) as an [n, K] matrix: an embedding look-up."""
        ...

    def plain(self) -> Tensor | None:
        """Return the [N, K] matrix bit by bit as it was packed; None if packing rounded it."""
        ...

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ self.T + bias: [T, K] -> [T, N] in x's dtype."""
        ...

    def matmul_f32(self, x: Tensor) -> Tensor:
        """Return x @ self.T as float32 accumulators: [T, K] -> [T, N] float32."""
        ...


def pack(weight: Tensor | Groups, mode: WeightMode, dtype: torch.dtype) -> Tensor | PackedWeight:
    """Turn a loaded matrix into what multiplies fastest here. Never called on CUDA.

    "auto" keeps a file's precision: quantised groups stay groups, which measured fastest for the
    bundled model (Q4_1 matrices, Q8_0 table: the products of one row take less than half the time of
    bfloat16, those of eight two thirds: benchmarks/results/cpu-ops.json), and plain matrices stay
    plain. With float32 activations it
    dequantises: who asks for float32 wants its arithmetic, and the group kernel rounds activations
    to int8. "4bit" and "8bit" round plain matrices (`quantize` states the error) and leave groups
    alone: rounding codes again would only lose. "bf16" dequantises groups to the activations'
    dtype.

    Args:
        weight: [N, K] matrix, or quantised groups.
        mode: see above.
        dtype: the activations' dtype.

    Returns:
        A tensor of `dtype`, or a PackedWeight. Matrices whose shape no kernel takes (K no multiple
        of a group) stay plain.
    """
    bits = {"4bit": 4, "8bit": 8}.get(mode)
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().to(dtype)
        if bits is not None and weight.shape[1] % _SIZE == 0:
            weight = quantize(weight, bits=bits, size=_SIZE)
    if isinstance(weight, Groups):
        if mode in ("4bit", "8bit") or (mode == "auto" and dtype.itemsize == 2):
            packed = implementation("pack_groups", "cpu", dtype)(weight, dtype)
            if packed is not None:
                return cast("PackedWeight", packed)
        weight = weight.dequantize(dtype)
    dense = implementation("pack_dense", "cpu", dtype)(weight)
    return cast("Tensor | PackedWeight", dense)
