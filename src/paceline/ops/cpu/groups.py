"""Products with 4- and 8-bit weights in groups of 32: own kernel, and torch's packed product.

The own kernel rounds activations to int8, one scale per row and group of 32, as llama.cpp does,
and sums integers exactly. Measured against the product in float64 with the dequantised weights, its
outputs are off by 0.56 % of their deviation (bfloat16 activations by 0.16 %). Torch's 4-bit product
keeps the activations but rounds scales and mins to their dtype: 0.25 % in bfloat16. (Record:
benchmarks/results/cpu-ops.json.)

Rows are independent in both; torch's product gets them in numbers that agree (`rows`).

Letters: T tokens, K/N input/output features, G groups of 32 in a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.ops.cpu import rows
from paceline.ops.cpu.memory import place
from paceline.ops.cpu.native import DTYPES, Native, native, needs_grad
from paceline.ops.cpu.native import refusal as own_refusal
from paceline.ops.cpu.threads import kernel_threads
from paceline.ops.reference.fused import wide

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.ops.packed import Groups

SIZE = 32  # of a group; other sizes are dequantised
COLUMNS = 16  # of a block, as in groups.c


def _padded(value: Tensor, multiple: int) -> Tensor:
    """More rows of zeros, up to a multiple."""
    missing = -value.shape[0] % multiple
    return functional.pad(value, (0, 0, 0, missing)) if missing else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupWeight:
    """A quantised [N, K] matrix in blocks of 16 output features; implements `PackedWeight`."""

    codes: Tensor  # [N/16, G, bytes] uint8, see groups.c
    scales: Tensor  # [N/16, G, 16] float16 or float32
    mins: Tensor | None
    zero: int  # value = (code - zero) * scale + min
    bits: int
    shape: tuple[int, int]
    dtype: torch.dtype  # of `rows`
    lib: Native
    addresses: tuple[int, int, int | None]

    @staticmethod
    def pack(groups: Groups, dtype: torch.dtype, lib: Native) -> GroupWeight:
        """Lay out groups of 32; scales are kept as they are, exactly."""
        n, k = groups.shape
        codes, scales, mins, zero = groups.codes, groups.scales, groups.mins, 0
        if codes.dtype == torch.int8:
            zero = 1 << (groups.bits - 1)
            codes = (codes.to(torch.int16) + zero).to(torch.uint8)
        elif mins is not None and torch.equal(mins.float(), scales.float() * -8):
            zero, mins = 8, None  # Q4_0
        count = k // SIZE
        laid = _padded(codes, COLUMNS).view(-1, COLUMNS, count, 8, 4).permute(0, 2, 3, 1, 4)
        if groups.bits == 4:
            laid = laid[:, :, :4] | (laid[:, :, 4:] << 4)
        sides = [s for s in (scales, mins) if s is not None]
        exact = all(torch.equal(s.half().float(), s.float()) for s in sides)
        kind = torch.float16 if exact else torch.float32

        def side(value: Tensor) -> Tensor:
            return place(_padded(value.to(kind), COLUMNS).view(-1, COLUMNS, count).transpose(1, 2))

        laid = place(laid.reshape(laid.shape[0], count, -1))
        scales, mins = side(scales), None if mins is None else side(mins)
        low = None if mins is None else mins.data_ptr()
        return GroupWeight(
            codes=laid,
            scales=scales,
            mins=mins,
            zero=zero,
            bits=groups.bits,
            shape=(n, k),
            dtype=dtype,
            lib=lib,
            addresses=(laid.data_ptr(), scales.data_ptr(), low),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        side = self.scales.nbytes + (0 if self.mins is None else self.mins.nbytes)
        return self.codes.nbytes + side

    @property
    def kind(self) -> str:
        """One line for people."""
        how = f"int8 activations, {self.lib.groups}"
        return f"{self.bits}-bit groups of {SIZE}, own kernel, {how}"

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` ([n] int64) as an [n, K] matrix, dequantised in float32, rounded once."""
        n, k = self.shape
        kind = self.dtype if self.dtype in DTYPES else torch.float32
        out = torch.empty(ids.shape[0], k, dtype=kind)
        ids = ids.contiguous()
        self.lib.packed_rows(
            *self.addresses,
            ids.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            k,
            n,
            self.bits,
            self.zero,
            DTYPES[self.scales.dtype],
            DTYPES[kind],
        )
        return out.to(self.dtype)

    def plain(self) -> None:
        """The exact matrix is gone."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ self.T + bias: [T, K] -> [T, N] in x's dtype."""
        return self._multiply(x, bias, x.dtype)

    def matmul_f32(self, x: Tensor) -> Tensor:
        """x @ self.T: [T, K] -> [T, N] float32, not rounded."""
        return self._multiply(x, None, wide(x.dtype))

    def _multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        if x.dtype not in DTYPES or needs_grad(x, bias):
            every = self.rows(torch.arange(n)).to(x.dtype)
            return functional.linear(x, every, bias).to(dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], n, dtype=dtype)
        self.lib.packed(
            x.data_ptr(),
            *self.addresses,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            k,
            n,
            x.stride(0),
            self.bits,
            self.zero,
            DTYPES[x.dtype],
            DTYPES[self.scales.dtype],
            0 if bias is None else DTYPES[bias.dtype],
            DTYPES[dtype],
            kernel_threads(),
        )
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchInt4Weight:
    """A 4-bit [N, K] matrix for `_weight_int4pack_mm_for_cpu`; implements `PackedWeight`."""

    codes: Tensor  # torch's own layout
    scales: Tensor  # [G, N, 2]: scale, and the value of code 8
    source: Groups  # for `rows`; codes shared with nobody
    shape: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def pack(groups: Groups, dtype: torch.dtype) -> TorchInt4Weight:
        """Hand groups of 32 to torch."""
        codes = groups.codes.to(torch.int32) + (8 if groups.codes.dtype == torch.int8 else 0)
        scales = groups.scales.float()
        middle = torch.zeros_like(scales) if groups.mins is None else groups.mins.float()
        if groups.codes.dtype != torch.int8:  # unsigned code 8 stands for 8 * scale + min
            middle = middle + 8 * scales
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        both = torch.stack((scales, middle), dim=-1).transpose(0, 1).contiguous().to(dtype)
        return TorchInt4Weight(
            codes=packed, scales=both, source=groups, shape=groups.shape, dtype=dtype
        )

    @property
    def nbytes(self) -> int:
        """Bytes held, the codes for look-ups included."""
        side = self.source.scales.nbytes
        side += 0 if self.source.mins is None else self.source.mins.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.source.codes.nbytes + side

    @property
    def kind(self) -> str:
        """One line for people."""
        return f"4-bit groups of {SIZE}, torch's packed product"

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` ([n] int64) as an [n, K] matrix."""
        return self.source.rows(ids).dequantize(self.dtype)

    def plain(self) -> None:
        """The exact matrix is gone."""

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ self.T + bias: [T, K] -> [T, N] in x's dtype."""
        n, k = self.shape
        counts = _agreeing(k, n, self.dtype, torch.get_num_threads())
        out = rows.by_rows(x.to(self.dtype), counts, self._multiply).to(x.dtype)
        return out if bias is None else out + bias

    def _multiply(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, SIZE, self.scales)
        return found

    def matmul_f32(self, x: Tensor) -> Tensor:
        """x @ self.T: [T, K] -> [T, N], rounded to x's dtype, then widened."""
        return self.matmul(x).to(wide(x.dtype))


@functools.cache
def _agreeing(k: int, n: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """As `rows.agreeing`, for torch's 4-bit product; `threads` is part of the key only."""
    del threads
    from paceline.ops.packed import Groups

    gen = torch.Generator().manual_seed(k)
    x, order = torch.randn(k // 2, generator=gen).to(dtype), torch.randperm(k // 2, generator=gen)
    codes = torch.randint(1, 16, (n, k // 2), generator=gen, dtype=torch.uint8)
    scales = torch.ones(n, k // SIZE)
    groups = Groups(  # code and 16 - code stand for the same value with both signs
        codes=torch.cat([codes, 16 - codes[:, order]], dim=1),
        scales=scales,
        mins=-8 * scales,
        size=SIZE,
        bits=4,
    )
    weight = TorchInt4Weight.pack(groups, dtype)
    return rows.counts_that_agree(weight._multiply, torch.cat([x, x[order]]))  # noqa: SLF001


def refusal(dtype: torch.dtype) -> str | None:
    """Why the own kernel does not serve activations of this dtype here; None: it does."""
    lib = native()
    if lib is None or dtype not in DTYPES:
        return own_refusal(dtype)
    return None if lib.groups else "the processor multiplies no vectors of bytes"


def pack(groups: Groups, dtype: torch.dtype) -> GroupWeight | None:
    """Lay out groups for the own kernel; None: it takes 4 or 8 bits in groups of 32 only."""
    lib = native()
    assert lib is not None, "dispatch chose own kernels where there are none"
    if groups.size != SIZE or groups.bits not in (4, 8):
        return None
    return GroupWeight.pack(groups, dtype, lib)


def pack_torch(groups: Groups, dtype: torch.dtype) -> TorchInt4Weight | None:
    """Hand groups to torch's product; None: it takes 4 bits in groups of 32, and N in sixteens."""
    fits = groups.size == SIZE and groups.bits == 4 and groups.shape[0] % COLUMNS == 0
    return TorchInt4Weight.pack(groups, dtype) if fits and dtype in DTYPES else None
