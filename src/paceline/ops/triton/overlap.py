"""Kernels that begin while the one before ends: programmatic dependent launch, on GPUs from 9.0 on.

Between two kernels of a stream, or of a captured graph, a GPU waits for the last program of the first
and only then launches the second: about half a microsecond, some hundred times a step. A kernel with
these launch options may be launched as soon as all programs of the one before have said so
(`overlap_kernels.release`) or ended, and waits at `follow` until that one is complete and what it wrote
can be seen. Before it nothing is read, weights neither: outside a step they may be the last kernel's
output. So the order of results is the stream's, as without. (CUDA programming guide, "Programmatic
dependent launch".)

When to say so was measured. A product that fills the GPU says so at once. A small kernel says so at its
end: programs launched beside it settle unevenly on the processors, and the next product takes as long
as the fullest of them. With many tokens nothing overlaps, since there that outweighs the gain
(docs/performance.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_CAPABILITY = (9, 0)
_MOST_TOKENS = 64
NONE, AT_ONCE, AT_END = (
    0,
    1,
    2,
)  # when the kernel behind may be launched; 0: when this one has ended


def product(x: Tensor) -> dict[str, int]:
    """Launch options of a product of x [tokens, ...]; the kernel's and Triton's own."""
    return _options(x, AT_ONCE)


def between(x: Tensor) -> dict[str, int]:
    """Launch options of a kernel between products, over x [tokens, ...]."""
    return _options(x, AT_END)


def _options(x: Tensor, when: int) -> dict[str, int]:
    if not x.is_cuda or x.shape[0] > _MOST_TOKENS or torch.version.hip is not None:
        return {"OVERLAPS": NONE}
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return {"OVERLAPS": NONE}
    return {"OVERLAPS": when, "launch_pdl": True}
