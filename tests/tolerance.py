"""How far an implementation may be from the definition in float64: one table for all op tests."""

from __future__ import annotations

import torch
from torch import Tensor

# Root mean square of the error over that of the values. 16-bit: one rounding of the result (2^-9
# and 2^-12 of a value at most) and nothing else; float32: sums of a few thousand terms.
RELATIVE = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.bfloat16: 2.5e-3,
    torch.float16: 3e-4,
}
# Products with activations rounded to int8 in groups of 32: absmax / 254 / sqrt(3) a value.
INT8_ACTIVATIONS = 8e-3
# Factors on a row of the table: where a result is rounded on the way too (two errors of one size),
# and for Triton's interpreter, which cuts numbers off for bfloat16 instead of rounding them.
ROUNDED_TWICE = 1.5
CUT_OFF = 2.5


def error(found: Tensor, exact: Tensor) -> float:
    """Relative root mean square error of `found` against float64."""
    exact = exact.double()
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def close(found: Tensor, exact: Tensor, limit: float | None = None) -> bool:
    """Whether the error is within the dtype's row of the table, or a given limit."""
    assert found.shape == exact.shape, f"{tuple(found.shape)} is not {tuple(exact.shape)}"
    limit = RELATIVE[found.dtype] if limit is None else limit
    return error(found, exact) <= limit * (2 if exact.numel() < 64 else 1)  # few have no mean
