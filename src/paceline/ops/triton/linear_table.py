"""Which products of few rows the Triton kernels compute, and how: what a sweep measured.

`python benchmarks/gpu_linear.py --table src/paceline/ops/triton/linear_table.py` writes the lines of
TABLE anew. What has no line is cuBLAS's, because nothing was measured or because it was faster.

Letters: T tokens, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass

CAPABILITY = (9, 0)  # of the GPUs that the lines are for: tiles fill their shared memory
BLOCKS = (16, 32, 64, 128)  # most rows of a line; a program holds as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a product is cut up. All but warps and stages touch the result's bits."""

    block_n: int  # output features of a program, a power of two >= 16
    block_k: int  # input features at once, a power of two >= 16
    split: int = 1  # parts of K, each a program's, added afterwards in their order
    num_warps: int = 4
    num_stages: int = 4  # blocks on their way at once
    swap: bool = False  # the weight is the left factor


# (operator, N, K): {most rows: tiles}.
TABLE: dict[tuple[str, int, int], dict[int, Tiles]] = {
    ("linear_add_rms_norm", 4096, 12288): {
        16: Tiles(block_n=64, block_k=128, split=3, swap=True),
        32: Tiles(block_n=64, block_k=128, split=2, swap=True),
        64: Tiles(block_n=64, block_k=128, split=2),
    },
    ("linear_add_rms_norm", 4096, 4096): {
        16: Tiles(block_n=64, block_k=128, split=2, swap=True),
        32: Tiles(block_n=64, block_k=128, split=2, swap=True),
        64: Tiles(block_n=64, block_k=128, split=2),
    },
    ("linear", 6144, 4096): {
        16: Tiles(block_n=64, block_k=256, num_stages=3, swap=True),
    },
    ("linear_f32", 151936, 4096): {
        16: Tiles(block_n=64, block_k=128, swap=True),
        32: Tiles(block_n=64, block_k=128, swap=True),
    },
    ("linear", 24576, 4096): {
        16: Tiles(block_n=64, block_k=128, num_stages=3),
    },
}


def tiles_for(op: str, rows: int, n: int, k: int) -> Tiles | None:
    """Return the tiles of a product of `rows` rows, or None: cuBLAS.

    The same for all numbers of rows up to 16, so that a row's bits do not depend on its company there.
    """
    lines = TABLE.get((op, n, k), {})
    block = next((block for block in BLOCKS if rows <= block), None)
    return None if block is None else lines.get(block)
