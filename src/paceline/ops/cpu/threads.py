"""Who may use the cores: own kernels all of them, PyTorch's operators between them one.

OpenMP's threads spin for some milliseconds after a call, on the cores that the next own kernel needs,
and a team is waited for whole: on a busy machine a softmax of a few hundred numbers can take longer
than a network's pass. What lies between the kernels of a step is small, so it loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch

_KERNELS: Final[ContextVar[int | None]] = ContextVar("threads of own kernels", default=None)


def kernel_threads() -> int:
    """Threads that an own kernel may use: PyTorch's number, also where `one_thread` holds that back."""
    return _KERNELS.get() or torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operators keep to the calling thread meanwhile; own kernels do not."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    token = _KERNELS.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _KERNELS.reset(token)
