"""Kernels that begin while the one before ends: programmatic dependent launch, on GPUs from 9.0 on.

Between two kernels of a stream, or of a captured graph, a GPU waits for the last program of the first,
then launches the second: about a microsecond, some hundred times a step. A kernel launched with
`arguments` may be launched as soon as all programs of the one before have begun, and waits at `follow`
until that one has ended and what it wrote can be seen. What stands before `follow` may read only what no
kernel of the step writes, which is weights. CUDA programming guide, "Programmatic dependent launch".

The order of results is the stream's, as without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_CAPABILITY = (9, 0)


def arguments(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls `follow`, on the device of x; triton's and the kernel's own."""
    if not x.is_cuda or torch.version.hip is not None:
        return {"OVERLAPS": False}
    if torch.cuda.get_device_capability(x.device) < _CAPABILITY:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}
