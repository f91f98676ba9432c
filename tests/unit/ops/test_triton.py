"""Triton kernels on a CPU: in the interpreter, in a process of their own; and what the host decides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.attention import choose
from paceline.attention.triton import TritonAttention
from paceline.kv.layout import Heads
from paceline.ops.triton.grid import Shape, WorkSpace, refusal, shape, tiles_for

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_attention_in_the_interpreter() -> None:
    """The kernels compute what `ops/reference` defines, as far as a CPU can tell."""
    grid = "tests/interpreted/triton_attention.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", grid],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


def planned(num_rows: int, num_keys: int, q_len: int = 1, processors: int = 132) -> Shape:
    return shape(
        num_rows=num_rows,
        q_len=q_len,
        num_keys=num_keys,
        q_heads=32,
        kv_heads=8,
        dim=128,
        processors=processors,
    )


def test_long_rows_are_split_and_many_short_ones_are_not() -> None:
    """One long row must fill the device; a thousand short ones do, and need no second kernel."""
    assert planned(1, 32_768).split
    assert planned(64, 32_768).split
    assert not planned(1024, 640).split
    assert not planned(1, 512).split


def test_more_processors_change_no_unit() -> None:
    """Units decide the bits of a result; the machine decides only who computes them."""
    few, many = planned(64, 2048, processors=8), planned(64, 2048, processors=10_000)
    assert not few.split
    assert many.split
    assert few.tiles == many.tiles


def test_partial_results_are_bounded() -> None:
    """A work space of gigabytes would come out of the pool's memory."""
    large = planned(512, 131_072, q_len=32)
    assert not large.split
    assert planned(64, 32_768).num_partials * 130 * 4 <= 256 << 20


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_tiles_fit_the_rules_of_the_kernels(dim: int) -> None:
    """A product has 16 rows at least; units and tiles lie at fixed places."""
    for nodes in range(1, 257):
        for group in (1, 3, 4, 8):
            tiles = tiles_for(nodes * group, dim)
            assert tiles.block_m >= 16
            assert tiles.unit % tiles.block_n == 0
            assert tiles.block_n % 32 == 0
            if nodes * group <= 128:
                assert tiles.block_m >= nodes * group, "the prefix is read once"


def test_work_space_never_moves() -> None:
    """A captured graph goes on writing where it was captured."""
    work = WorkSpace()
    cpu = torch.device("cpu")
    small = work.take(100, cpu)
    large = work.take(5000, cpu)
    assert large.numel() >= 5000
    assert work.take(90, cpu).data_ptr() == small.data_ptr()
    assert work.take(5000, cpu).data_ptr() == large.data_ptr()


@pytest.mark.parametrize(
    "dtype, dim, reason",
    [
        (torch.float32, 64, "for bfloat16 and float16, not for torch.float32"),
        (torch.bfloat16, 80, "for heads of 64, 96, 128 numbers, not of 80"),
    ],
)
def test_refusals_say_what_is_served(dtype: torch.dtype, dim: int, reason: str) -> None:
    """`doctor` repeats them."""
    assert reason in (refusal(dtype, dim) or "")


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is a reason, not a crash."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in (refusal(torch.bfloat16, 64) or "")


def test_a_cpu_never_gets_it() -> None:
    """Kernels for a GPU have no place in a pool in main memory."""
    cpu = torch.device("cpu")
    reason = TritonAttention().refuses(Heads(3, 64), cpu, torch.bfloat16, 16)
    assert reason == "it is for CUDA devices, not for cpu"
    assert type(choose(Heads(3, 64), cpu, torch.bfloat16, 16)[0]) is not TritonAttention
