"""Device code of `ops/triton/overlap.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Wait for the kernel before, and let the one behind be launched."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
