"""The kernels' threads: right from any number of threads, callers and processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from paceline import ops
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import native

pytestmark = pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """One thread again afterwards."""
    yield
    torch.set_num_threads(1)


def product() -> tuple[torch.Tensor, ops.PackedWeight, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 64, generator=gen).bfloat16()
    x = torch.randn(7, 64, generator=gen).bfloat16()
    held = ops.pack(weight, "auto", torch.bfloat16)
    assert not isinstance(held, torch.Tensor)
    torch.set_num_threads(1)
    return x, held, held.matmul(x)


def test_any_number_of_threads_gives_the_same() -> None:
    """Growing, shrinking, and more threads than cores or chunks."""
    x, held, want = product()
    for count in (2, 5, 1, 3, 40, 2):
        torch.set_num_threads(count)
        for _ in range(50):
            assert torch.equal(held.matmul(x), want), count


def test_threads_that_fell_asleep_wake_up() -> None:
    """After a pause in which every thread goes to sleep, work is done as before."""
    x, held, want = product()
    torch.set_num_threads(3)
    for _ in range(5):
        assert torch.equal(held.matmul(x), want)
        time.sleep(0.02)


def test_callers_at_the_same_time_do_not_wait_or_mix() -> None:
    """One caller has the pool; the others do their work themselves."""
    x, held, want = product()
    wrong: list[int] = []

    def call(caller: int) -> None:
        torch.set_num_threads(2)
        equal = [torch.equal(held.matmul(x), want) for _ in range(100)]
        wrong.extend(caller for same in equal if not same)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    """A child has none of the parent's threads; waiting for them would hang it for ever."""
    code = """
import os, torch
from paceline import ops
held = ops.pack(torch.ones(1000, 64).bfloat16(), "auto", torch.bfloat16)
x = torch.ones(3, 64).bfloat16()
torch.set_num_threads(3)
assert (held.matmul(x) == 64).all()
child = os.fork()
if child == 0:
    os._exit(0 if (held.matmul(x) == 64).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (held.matmul(x) == 64).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
