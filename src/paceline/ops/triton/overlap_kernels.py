"""Device code of `ops/triton/overlap.py`, where it is said when what is launched.

OVERLAPS: 0, not at all; 1, the kernel behind may be launched at once; 2, at this one's end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Wait for the kernel before; with 1 let the one behind be launched."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    if OVERLAPS == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def release(OVERLAPS: tl.constexpr):
    """With 2 let the kernel behind be launched."""
    if OVERLAPS == 2:
        tl.extra.cuda.gdc_launch_dependents()
