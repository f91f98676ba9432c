"""Operators that are two others where no kernel is both: each part by its fastest implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paceline.ops.dispatch import implementation

if TYPE_CHECKING:
    from torch import Tensor


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.linear.linear_add_rms_norm`."""
    kind = x.device.type
    product = implementation("linear", kind, x.dtype)(x, weight, None)
    found = implementation("add_rms_norm", kind, x.dtype)(product, residual, norm_weight, eps)
    return cast("tuple[Tensor, Tensor]", found)


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.linear.linear_swiglu`."""
    kind = x.device.type
    product = implementation("linear", kind, x.dtype)(x, weight, None)
    return cast("Tensor", implementation("silu_mul", kind, x.dtype)(product))
