from __future__ import annotations

import gc
import mmap

import pytest
import torch

from paceline.core import device
from paceline.core.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({"avx2", "avx512_bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16"),
        ({"avx2", "avx512f"}, "float32"),
        (set(), "float32"),
    ],
    ids=["AVX512-BF16", "AMX", "Arm BF16", "AVX512 without BF16", "unknown, a Mac"],
)
def test_bfloat16_where_it_is_native_or_own_kernels_serve(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], expected: str
) -> None:
    """PyTorch emulates it slower than float32; own kernels read half the bytes on any processor."""
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    assert device.choose_dtype("auto", CPU, "no compiler") == expected
    assert device.choose_dtype("auto", CPU, None) == "bfloat16"
    assert device.choose_dtype("float64", CPU, None) == "float64", "what was asked for stays"


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99", "gpu0"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    """The message repeats what was asked and says what can be."""
    with pytest.raises(ConfigError, match=rf"'{name}'.*cpu"):
        device.choose_device(name)


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one, and a PyTorch that could not use it, are different things to mend."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    for built, why in ((None, "built without CUDA; install one"), ("13.0", "no CUDA device")):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(ConfigError, match=rf"'cuda' was asked for, .*{why}.*; use cpu or auto"):
            device.choose_device("cuda")


def test_bfloat16_on_a_gpu_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one gets float32, and the reason with another way."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert device.choose_dtype("auto", gpu, None) == "bfloat16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert device.choose_dtype("auto", gpu, None) == "float32"
    assert device.choose_dtype("bfloat16", gpu, None) == "bfloat16", "what was asked for stays"
    said = device.slower_dtype(gpu, None)
    assert said is not None
    assert "capability 7.5" in said
    assert "float16" in said
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device.choose_dtype("auto", gpu, None) == "bfloat16", (
        "others count their chips otherwise"
    )


@pytest.mark.parametrize("stated, cores", [("1", 1), ("0", None), ("many", None), ("9999", None)])
def test_threads_may_be_stated_as_usual(
    monkeypatch: pytest.MonkeyPatch, stated: str, cores: int | None
) -> None:
    """OMP_NUM_THREADS lowers the number of threads, never raises it; nonsense is passed over."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    usable = device.usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert device.usable_cores() == (cores or usable)


def test_memory_is_measured() -> None:
    """A budget stands on these numbers: free, and what this process holds, which grows."""
    gc.collect()  # what is freed while this test runs would be taken off
    before = device.used_memory(CPU)
    assert before > 1 << 20
    # Pages of their own: a tensor may get memory that this process holds already, from earlier tests.
    with mmap.mmap(-1, 64 << 20) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert device.used_memory(CPU) - before > 32 << 20
    assert device.free_memory(CPU) > 1 << 20
