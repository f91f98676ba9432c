"""Products with dense matrices on a CPU: own kernels with prepacked weights, and torch's.

Both are batch-invariant: a row's bits do not depend on how many rows there are. Own kernels are by
construction, torch's products because rows go in numbers that agree (`rows`); float64 promises nothing.

Letters: T tokens, K/N input/output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.ops.cpu import rows
from paceline.ops.cpu.memory import place
from paceline.ops.cpu.native import DTYPES, Native, native, needs_grad
from paceline.ops.cpu.threads import kernel_threads
from paceline.ops.reference.fused import wide

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseWeight:
    """An [N, K] matrix in blocks of C (32 or 16) output features; implements `PackedWeight`.

    bfloat16 with AVX512-BF16: products of two bfloat16 and sums in float32, one rounding at the
    end. Otherwise everything is multiplied and summed in float32.
    """

    blocks: Tensor  # [N/C, K, C]; bfloat16: [N/C, K/2, C, 2] in pairs, else [N/C, K, C/2, 2]
    shape: tuple[int, int]
    lib: Native
    address: int

    @staticmethod
    def pack(weight: Tensor, lib: Native) -> DenseWeight:
        """Lay out a float32, bfloat16 or float16 matrix."""
        n, k = weight.shape
        columns = lib.columns
        if n % columns:
            weight = functional.pad(weight, (0, 0, 0, -n % columns))
        if weight.dtype != torch.bfloat16:
            blocks = weight.view(-1, columns, k).transpose(1, 2)
        elif lib.pairs:
            blocks = weight.view(-1, columns, k // 2, 2).transpose(1, 2)
        else:  # columns c and c + C/2 side by side
            blocks = weight.view(-1, 2, columns // 2, k).permute(0, 3, 2, 1)
        blocks = place(blocks)
        return DenseWeight(blocks=blocks, shape=(n, k), lib=lib, address=blocks.data_ptr())

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the activations that they are for."""
        return self.blocks.dtype

    @property
    def pairs(self) -> bool:
        """Whether input features are laid out in pairs, for bfloat16 activations only."""
        return self.lib.pairs and self.dtype == torch.bfloat16

    @property
    def way(self) -> int:
        """`pairs` of dense.c: 0 float32 arithmetic, 1 AVX512-BF16, 2 AMX; one of them for all rows."""
        return (2 if self.lib.tiles else 1) if self.pairs else 0

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.blocks.nbytes

    @property
    def kind(self) -> str:
        """One line for people."""
        how = ("float32 arithmetic", "AVX512-BF16", "AMX")[self.way]
        return f"{str(self.dtype)[6:]}, own kernel, {how}"

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` ([n] int64) as an [n, K] matrix; NaN for an id that there is not."""
        n, k = self.shape
        out = torch.empty(ids.shape[0], k, dtype=self.dtype)
        ids = ids.contiguous()
        self.lib.dense_rows(
            self.address,
            ids.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            k,
            n,
            DTYPES[self.dtype],
            self.pairs,
        )
        return out

    def plain(self) -> Tensor:
        """The [N, K] matrix, bit by bit."""
        return self.rows(torch.arange(self.shape[0]))

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ self.T + bias: [T, K] -> [T, N] in x's dtype."""
        return self._multiply(x, bias, x.dtype)

    def matmul_f32(self, x: Tensor) -> Tensor:
        """x @ self.T: [T, K] -> [T, N] float32, not rounded."""
        return self._multiply(x, None, wide(x.dtype))

    def _multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        blocks = self.blocks
        if (
            x.dtype not in DTYPES
            or (self.pairs and x.dtype != torch.bfloat16)
            or needs_grad(x, bias)
        ):
            every = self.plain().to(x.dtype)
            return functional.linear(x, every, bias).to(dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], n, dtype=dtype)
        self.lib.dense(
            x.data_ptr(),
            self.address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            k,
            n,
            x.stride(0),
            DTYPES[x.dtype],
            DTYPES[blocks.dtype],
            0 if bias is None else DTYPES[bias.dtype],
            DTYPES[dtype],
            self.way,
            kernel_threads(),
        )
        return out


def pack(weight: Tensor) -> Tensor | DenseWeight:
    """Lay out a matrix for the own kernel; one that it does not take stays as it is."""
    lib = native()
    assert lib is not None, "dispatch chose own kernels where there are none"
    odd = weight.shape[1] % 2  # input features go in pairs
    if lib.pairs and weight.dtype == torch.bfloat16 and odd:
        return weight
    return DenseWeight.pack(weight, lib)


def plain(weight: Tensor) -> Tensor:
    """A matrix as it is: torch's product."""
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch's product of [T, K] and [N, K], the same bits for a row in any company (16 and 32 bits)."""
    if x.dtype not in DTYPES or needs_grad(x, weight, bias) or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    return rows.linear(x, weight, bias)


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """The same, widened to float32 (float64 for float64); a 16-bit product was rounded before."""
    return linear(x, weight).to(wide(x.dtype))
