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


FOUND_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
FOUND_NONE = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
ODD = "CUDA unknown error - this may be due to an incorrectly set up environment\nmore lines"


def without_device(monkeypatch: pytest.MonkeyPatch, says: str, built: str | None) -> None:
    """A PyTorch that finds no device, and says so when it is made to begin."""

    def init() -> None:
        raise RuntimeError(says)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", built)


@pytest.mark.parametrize(
    "says, built, why, way, there",
    [
        ("-", None, "this PyTorch was built without CUDA", "install one that has it", False),
        ("No CUDA GPUs are available", "13.0", "no CUDA device is found", None, False),
        (FOUND_NONE, "13.0", "no NVIDIA driver", "install the driver if there is a GPU", False),
        (
            FOUND_OLD,
            "13.0",
            "the NVIDIA driver, which serves CUDA up to 11.4, is too old for this PyTorch's CUDA 13.0",
            "install a newer driver or a PyTorch build for an older CUDA",
            True,
        ),
        (ODD, "13.0", "(PyTorch says: CUDA unknown error - this", "mend what it names", True),
    ],
    ids=["a build without CUDA", "no GPU", "no driver", "an old driver", "anything else"],
)
def test_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    says: str,
    built: str | None,
    why: str,
    way: str | None,
    there: bool,
) -> None:
    """Each is another thing to mend. "auto" is the CPU then, and says why where a GPU goes to waste."""
    without_device(monkeypatch, says, built)
    with pytest.raises(ConfigError) as raised:
        device.choose_device("cuda")
    said = str(raised.value)
    assert said.startswith("device 'cuda' was asked for, but ")
    assert why in said
    assert said.endswith(f"; {way}, or use device cpu" if way else "; use cpu or auto")
    assert "\n" not in said
    assert device.choose_device("auto") == CPU
    aloud = [r.getMessage() for r in caplog.records]
    assert len(aloud) == there
    assert all(why in text and way in text for text in aloud)


def with_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], build: str) -> None:
    """A machine with a GPU, and a PyTorch that was built for some."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_arch_list", build.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")


@pytest.mark.parametrize(
    "capability, build, serves",
    [
        ((9, 0), "sm_75 sm_80 sm_90", True),
        ((8, 9), "sm_75 sm_80 sm_90", True),  # machine code of the same major version, not newer
        ((8, 6), "sm_75 sm_87 sm_90", False),
        ((9, 0), "sm_75 sm_80", False),
        ((12, 0), "sm_75 sm_90 compute_90", True),  # the driver compiles what came before it
        ((12, 1), "sm_90 sm_120", True),
        ((12, 0), "sm_90 sm_100", False),  # two digits are one major version
        ((7, 0), "sm_75 compute_75", False),
        ((9, 0), "sm_90a", True),
        ((9, 1), "sm_90a compute_90a", False),
        ((10, 3), "sm_100f", True),
        ((12, 0), "compute_100f", False),
        ((9, 0), "", True),  # a build that says nothing
        ((9, 0), "gfx90a", True),  # names that we do not know
    ],
)
def test_a_gpu_that_pytorch_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    build: str,
    serves: bool,
) -> None:
    """Found before the first kernel fails: what was asked, what the build serves, what to install."""
    with_gpu(monkeypatch, capability, build)
    if serves:
        assert device.choose_device("cuda:0") == torch.device("cuda:0")
        assert device.choose_device("auto") == torch.device("cuda")
        assert not caplog.records
        return
    with pytest.raises(ConfigError, match=r"^device 'cuda:0' was asked for, but .* no kernels for"):
        device.choose_device("cuda:0")
    assert device.choose_device("auto") == CPU
    (aloud,) = caplog.records
    assert "device 'auto' is the CPU here" in aloud.getMessage()


def test_what_serves_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer builds leave old GPUs out, and older ones do not know the new; numbers are named."""
    for capability, way in (((12, 0), "a newer"), ((5, 2), "an older"), ((8, 0), "another")):
        with_gpu(monkeypatch, capability, "sm_75 sm_86 sm_90")
        with pytest.raises(ConfigError) as raised:
            device.choose_device("cuda")
        said = str(raised.value)
        assert f"a card, whose compute capability is {capability[0]}.{capability[1]}; " in said
        assert "this build serves 7.5, 8.6, 9.0" in said
        assert said.endswith(f"install {way} PyTorch build that serves it, or use device cpu")
    with pytest.raises(ConfigError, match=r"1 CUDA device\(s\); use cpu or auto"):
        device.choose_device("cuda:1")


def test_another_makers_gpu_is_not_judged_by_these_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for ROCm calls its chips otherwise."""
    with_gpu(monkeypatch, (9, 4), "sm_75")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device.choose_device("cuda") == torch.device("cuda")


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
