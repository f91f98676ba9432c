from __future__ import annotations

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
    before = device.used_memory(CPU)
    assert before > 1 << 20
    held = torch.ones(1 << 24)  # 64 MB
    assert device.used_memory(CPU) - before > 32 << 20
    assert held.sum() > 0
    assert device.free_memory(CPU) > 1 << 20
