"""What an operator is about to compute, said before it runs: a crash then names its inputs.

With PACELINE_LOG_OPS=1 every operator logs its name, its implementation and the dtypes and shapes of
its arguments to the logger `paceline.ops.calls`; whole passes in one native call too. Where nobody has
set up logging the lines go to stderr. The variable is read once, when this module is imported: without
it nothing is wrapped and nothing is asked.

A GPU runs behind the host: there the last line names the crash only with CUDA_LAUNCH_BLOCKING=1.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from paceline.core import environment

log = logging.getLogger(__name__)

ANNOUNCES = environment.logs_ops()


def announce(op: str, implementation: str, *arguments: object) -> None:
    """Log a call that follows at once.

    Args:
        op: the operator.
        implementation: who computes it.
        arguments: what it is given, in order.
    """
    _open()
    given = ", ".join(describe(value) for value in arguments)
    log.debug("%s [%s] %s", op, implementation, given)


def announced(op: str, implementation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, announced at each call where that is asked for; else itself."""
    if not ANNOUNCES:
        return function

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        announce(op, implementation, *args, *kwargs.values())
        return function(*args, **kwargs)

    return call


def describe(value: object) -> str:
    """An argument in a few words: "bfloat16[3, 64] cpu", with strides where they are not plain."""
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype)[6:]}{list(value.shape)} {value.device}"
        return text if value.is_contiguous() else f"{text} strides {list(value.stride())}"
    kind, shape = getattr(value, "kind", None), getattr(value, "shape", None)
    if kind is not None and shape is not None:  # a packed weight
        return f"packed{list(shape)} ({kind})"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@functools.cache
def _open() -> None:
    """Let the lines through; to stderr where nobody has said where records go."""
    log.setLevel(logging.DEBUG)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
