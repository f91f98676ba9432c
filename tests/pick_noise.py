"""A kernel that writes down the noise that the pick's kernels use and keep nowhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops.triton.pick_kernels import gumbel, noise_words, uniforms


@triton.jit
def noise_kernel(keys, positions, words, values, noise, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word_0, word_1 = noise_words(tl.load(keys + at), tl.load(positions + at))
    tl.store(words + at * 2, word_0)
    tl.store(words + at * 2 + 1, word_1)
    v = uniforms(ids, word_0, word_1)
    tl.store(values + at * size + ids, v, mask=ids < size)
    tl.store(noise + at * size + ids, gumbel(v), mask=ids < size)


def noise_of(keys: Tensor, positions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words [m, 2] int32, uniforms [m, size] and Gumbel noise [m, size] float32."""
    count = len(keys)
    words = torch.empty(count, 2, dtype=torch.int32, device=keys.device)
    values, noise = torch.empty(2, count, size, device=keys.device)
    grid = (count, -(-size // 1024))
    noise_kernel[grid](
        keys, positions, words, values, noise, size, BLOCK=1024, num_warps=4, num_stages=1
    )
    return words, values, noise
