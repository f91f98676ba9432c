"""Sizes of blocks; nothing that needs Triton."""

from __future__ import annotations


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
