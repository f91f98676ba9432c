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
        "tiled": "paceline.attention.tiled:TiledAttention",
        "triton": "paceline.attention.triton:TritonAttention",
        "triton-invariant": "paceline.attention.triton_invariant:InvariantTritonAttention",
        "sdpa": "paceline.attention.sdpa:SdpaAttention",
        "reference": "paceline.attention.reference:ReferenceAttention",
    },
)


def refusals(
    layout: KVLayout,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    *,
    invariant: bool = False,
) -> dict[str, str | None]:
    """Why each backend cannot serve such a pool (None: it can), in order of preference; see `choose`."""
    answers = {name: _ask(name, layout, device, dtype, page_size, invariant) for name in BACKENDS}
    return {name: answer if isinstance(answer, str) else None for name, answer in answers.items()}


def choose(
    layout: KVLayout,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    prefer: str | None = None,
    *,
    invariant: bool = False,
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """Return the first backend that does not refuse, and notes on those that did.

    Args:
        layout: what a token's cache entry holds.
        device: where the pool is.
        dtype: the pool's dtype.
        page_size: tokens per page.
        prefer: a backend's name, asked before the others.
        invariant: ask only those whose bits do not depend on who shares a pass.

    Returns:
        The backend, and one note for each that was asked and refused, with its reason.

    Raises:
        ConfigError: `prefer` is no backend's name, or every backend refuses.
    """
    names = list(BACKENDS)
    if prefer is not None:
        if prefer not in BACKENDS:
            BACKENDS.get(prefer)  # raises, and lists the known names
        names = [prefer, *(name for name in names if name != prefer)]
    reasons: list[str] = []
    for name in names:
        answer = _ask(name, layout, device, dtype, page_size, invariant)
        if not isinstance(answer, str):
            return answer, tuple(f"{reason}; using {name}" for reason in reasons)
        reasons.append(f"attention backend {name} not used: {answer}")
    msg = (
        f"no attention backend serves {layout}, {dtype}, pages of {page_size} on {device}: "
        f"{'; '.join(reasons)}. Choose another device, dtype or page size"
    )
    raise ConfigError(msg)


def _ask(
    name: str,
    layout: KVLayout,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    invariant: bool,
) -> AttentionBackend | str:
    """The backend, or the reason why it cannot serve; a package that it needs may be missing."""
    try:
        make = BACKENDS.get(name)
    except ImportError as error:
        return f"it can't be imported ({error})"
    backend = make()
    reason = backend.refuses(layout, device, dtype, page_size)
    if reason is None and invariant and not backend.invariant:
        reason = "its bits depend on who shares a pass"
    return backend if reason is None else reason
