"""A kernel that reads behind the end of its tensor: `tools/sanitize.py` must find it; no tests here.

python -m tests.out_of_bounds
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def astray_kernel(x, out, BLOCK: tl.constexpr):
    """Sixty-four numbers of one, whose memory ends before."""
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + 1024) + 1)


def main() -> None:
    """Launch it once."""
    x, out = torch.zeros(1, device="cuda"), torch.zeros(64, device="cuda")
    astray_kernel[(1,)](x, out, BLOCK=64, num_warps=1, num_stages=1)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
