"""Matrix products in plain torch: the definition, and the path of devices without own kernels.

Letters: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.ops.reference.fused import add_rms_norm, silu_mul, wide

if TYPE_CHECKING:
    from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias.

    Args:
        x: [T, K].
        weight: [N, K] in x's dtype.
        bias: [N] or None.

    Returns:
        [T, N] in x's dtype.
    """
    return functional.linear(x, weight, bias)


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T without rounding the result to 16 bits, where the library can.

    Args:
        x: [T, K].
        weight: [N, K] in x's dtype.

    Returns:
        [T, N] float32, or float64 for float64 inputs. On CUDA 16-bit inputs are multiplied with
        float32 output directly; elsewhere the 16-bit product is widened.
    """
    kind = wide(x.dtype)
    if x.dtype == kind:
        return functional.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=kind)
    return functional.linear(x, weight).to(kind)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(stream), stream) with stream = residual + x @ weight.T.

    The product is rounded to x's dtype, then the sum to the residual's: `linear`, then
    `fused.add_rms_norm`.

    Args:
        x: [T, K].
        weight: [N, K] in x's dtype.
        residual: [T, N], the stream so far.
        norm_weight: [N].
        eps: added to the mean square.

    Returns:
        [T, N] each, in the residual's dtype.
    """
    return add_rms_norm(linear(x, weight), residual, norm_weight, eps)


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up with [gate, up] = x @ weight.T, which is rounded to x's dtype.

    `linear`, then `fused.silu_mul`.

    Args:
        x: [T, K].
        weight: [2I, K] in x's dtype: gate's features, then up's.

    Returns:
        [T, I] in x's dtype.
    """
    return silu_mul(linear(x, weight))
