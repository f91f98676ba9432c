"""What a device cannot do for an engine, said with what can be done about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.core.device import free_cached, free_memory, lacks_memory
from paceline.core.errors import MemoryBudgetError
from paceline.ops.triton.refusal import refusal

_GB = 1e9


def kernels_refused(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """A note where own kernels do not serve a GPU or a number format; empty where they do.

    Args:
        device: where the engine is to be; a CPU has kernels of another kind.
        dtype: of activations.
    """
    reason = refusal(dtype) if device.type == "cuda" else None
    if reason is None:
        return ()
    note = (
        f"own kernels not used on {device}: {reason}; PyTorch's operators serve, slower, with the same "
        "outputs. With bfloat16 or float16, a GPU of compute capability 8.0 or more and Triton own "
        "kernels run; a CPU has others (device cpu)"
    )
    return (note,)


@contextmanager
def within_memory(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Say what did not fit a GPU's memory, where PyTorch or the driver only say that it is full.

    Args:
        what: is being done, as a noun.
        device: on which.
        remedy: what can be done, after "; ".

    Raises:
        MemoryBudgetError: in place of their errors; others pass.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type != "cuda" or not lacks_memory(error):
            raise
        free_cached(device)
        msg = (
            f"{what} needs more memory than {device} has left ({free_memory(device) / _GB:.2f} GB are "
            f"free of {_total(device) / _GB:.2f} GB); {remedy}"
        )
        raise MemoryBudgetError(msg) from error


def _total(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1])
