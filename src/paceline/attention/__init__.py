"""Attention backends by name, best first, and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from paceline.attention.base import AttentionBackend
    from paceline.kv.layout import KVLayout

BACKENDS: Registry[Callable[[], AttentionBackend]] = Registry(
    "attention backend",
    {
        "cpu": "paceline.attention.cpu:CpuAttention",
        "reference": "paceline.attention.reference:ReferenceAttention",
    },
)


def refusals(
    layout: KVLayout, device: torch.device, dtype: torch.dtype, page_size: int
) -> dict[str, str | None]:
    """Why each backend cannot serve such a pool (None: it can), in order of preference."""
    return {
        name: BACKENDS.get(name)().refuses(layout, device, dtype, page_size) for name in BACKENDS
    }


def choose(
    layout: KVLayout,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    prefer: str | None = None,
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """Return the first backend that does not refuse, and notes on those that did.

    Args:
        layout: what a token's cache entry holds.
        device: where the pool is.
        dtype: the pool's dtype.
        page_size: tokens per page.
        prefer: a backend's name, asked before the others.

    Returns:
        The backend, and one note for each that was asked and refused, with its reason.

    Raises:
        ConfigError: `prefer` is no backend's name, or every backend refuses.
    """
    names = list(BACKENDS)
    if prefer is not None:
        BACKENDS.get(prefer)  # an unknown name is an error that lists the known ones
        names = [prefer, *(name for name in names if name != prefer)]
    reasons: list[str] = []
    for name in names:
        backend = BACKENDS.get(name)()
        reason = backend.refuses(layout, device, dtype, page_size)
        if reason is None:
            return backend, tuple(f"{r}; using {name}" for r in reasons)
        reasons.append(f"attention backend {name} not used: {reason}")
    msg = (
        f"no attention backend serves {layout}, {dtype}, pages of {page_size} on {device}: "
        f"{'; '.join(reasons)}. Choose another device, dtype or page size"
    )
    raise ConfigError(msg)
