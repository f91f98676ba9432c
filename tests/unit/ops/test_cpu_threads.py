"""PyTorch keeps to one thread between own kernels, which have all of them; nothing of it stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from paceline.ops.cpu.threads import kernel_threads, one_thread


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    """A number of threads that is nobody's default."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_inside_and_after() -> None:
    """Also nested, and after an error."""
    with one_thread():
        assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
        with one_thread():
            assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
        assert kernel_threads() == 3
    assert (torch.get_num_threads(), kernel_threads()) == (3, 3)
    with pytest.raises(ValueError, match="x"), one_thread():
        raise ValueError("x")
    assert (torch.get_num_threads(), kernel_threads()) == (3, 3)


def test_another_thread_is_not_told() -> None:
    """What holds in one engine's step is no business of another thread's kernels."""
    found = []
    with one_thread():
        other = threading.Thread(
            target=lambda: found.append(kernel_threads() - torch.get_num_threads())
        )
        other.start()
        other.join()
    assert found == [0]
