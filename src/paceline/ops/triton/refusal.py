"""Why Triton kernels that are no matter of attention cannot run here; nothing that needs Triton."""

from __future__ import annotations

import importlib

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve tensors of a dtype on this machine's GPU, as a clause, or None."""
    if dtype not in DTYPES:
        return f"it is for bfloat16, float16 and float32, not for {str(dtype)[6:]}"
    if torch.version.hip is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return f"it needs a GPU of compute capability 8.0 or more; this one has {major}.{minor}"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"it needs Triton, which can't be imported ({error}); pip install triton"
    return None
