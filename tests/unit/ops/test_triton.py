"""Triton kernels on a CPU: in the interpreter, in a process of their own; and what the host decides."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch

from paceline.attention import choose
from paceline.attention.triton import TritonAttention
from paceline.kv.layout import Heads
from paceline.ops.triton.grid import Shape, Tiles, WorkSpace, refusal, shape, tiles_for
from tests.interpreter import linux, passes


@pytest.mark.slow
@linux
def test_attention_in_the_interpreter() -> None:
    """The kernels compute what `ops/reference` defines, as far as a CPU can tell."""
    passes("triton_attention")


def planned(num_rows: int, num_keys: int, q_len: int = 1) -> Shape:
    return shape(num_rows=num_rows, q_len=q_len, num_keys=num_keys, q_heads=32, kv_heads=8, dim=128)


def test_few_rows_are_split_and_many_short_ones_are_not() -> None:
    """One row must fill a device; a thousand short ones do, and need nothing joined."""
    assert planned(1, 32_768).units > 1
    assert planned(64, 32_768).units > 1
    assert planned(1024, 640).units == 1
    assert planned(1, 64).units == 1


@pytest.mark.parametrize("num_rows, num_keys, q_len", [(1, 2120, 1), (1, 2120, 16), (8, 2120, 1)])
def test_few_rows_have_a_hundred_programs(num_rows: int, num_keys: int, q_len: int) -> None:
    """A page table holds twice the keys that there are; half of the programs stop at once."""
    found = planned(num_rows, num_keys, q_len)
    assert 128 <= num_rows * 8 * found.blocks * found.units <= 1024
    assert found.last_joins, "a second kernel would take as long as the first"


def test_much_is_joined_by_a_kernel() -> None:
    """One program would read megabytes."""
    assert not planned(1, 65_536, q_len=32).last_joins
    assert planned(1, 65_536, q_len=32).units > 1


def test_more_rows_than_counters_are_joined_by_a_kernel() -> None:
    """Counters are made once."""
    tiles = Tiles(block_m=16, block_n=64, unit=64, num_warps=4, num_stages=2, last_joins=True)
    kwargs = {"q_len": 1, "num_keys": 128, "q_heads": 8, "kv_heads": 8, "dim": 128}
    assert shape(num_rows=8192, tiles=tiles, **kwargs).last_joins
    assert not shape(num_rows=8193, tiles=tiles, **kwargs).last_joins


def test_partial_results_are_bounded() -> None:
    """A work space of gigabytes would come out of the pool's memory."""
    for found in (planned(512, 131_072, q_len=32), planned(64, 32_768), planned(64, 131_072, 16)):
        assert found.num_partials * 130 * 4 <= 256 << 20
        assert found.units * found.tiles.unit >= 32_768


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_tiles_fit_the_rules_of_the_kernels(dim: int) -> None:
    """A product has 16 rows at least; units and tiles lie at fixed places."""
    for packed, streams, keys in itertools.product(
        (1, 16, 17, 64, 65, 128, 129, 900), (1, 16, 17, 128, 129, 8192), (16, 4096, 4097, 1 << 20)
    ):
        tiles = tiles_for(packed, streams, keys, dim)
        assert tiles.block_m >= 16
        assert tiles.unit % tiles.block_n == 0
        assert tiles.block_n % 32 == 0
        assert 1 <= tiles.least <= tiles.unit
        if packed <= 128 and streams > 128:
            assert tiles.block_m >= packed, "the prefix is read once"


def test_a_short_rest_is_no_unit() -> None:
    """Fewer keys than `least` at a row's end are read by the program of the unit before."""
    tiles = Tiles(block_m=16, block_n=64, unit=256, least=128, num_warps=4, num_stages=2)
    lengths = {1: 1, 256: 1, 383: 1, 384: 2, 639: 2, 640: 3, 1040: 4}
    assert {n: tiles.units(n) for n in lengths} == lengths
    exact = replace(tiles, least=1)
    assert [exact.units(n) for n in (1, 256, 257, 512, 513)] == [1, 1, 2, 2, 3]


def test_work_space_never_moves() -> None:
    """A captured graph goes on writing where it was captured."""
    work = WorkSpace()
    cpu = torch.device("cpu")
    small = work.take(100, cpu)
    large = work.take(5000, cpu)
    assert large.numel() >= 5000
    assert work.take(90, cpu).data_ptr() == small.data_ptr()
    assert work.take(5000, cpu).data_ptr() == large.data_ptr()
    counters = work.arrivals(cpu)
    assert not counters.any()
    assert work.arrivals(cpu).data_ptr() == counters.data_ptr()


def test_counters_are_made_outside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing runs, so nothing would be zeroed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Run the pass once before it is captured"):
        WorkSpace().arrivals(torch.device("cuda"))


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
