"""Which device and number format to use, and the facts behind the choice.

Pure look-ups of what the machine has; nothing is configured here.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import platform
import resource
import sys
from pathlib import Path

import torch

from paceline.core import cuda, environment
from paceline.core.config import DType
from paceline.core.errors import ConfigError

log = logging.getLogger(__name__)

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_BF16_MAJOR = 8  # compute capability
_LOGIT_BYTES, _LOGIT_SHARE = 1 << 30, 64  # most bytes of logits, and which part of a GPU's memory


def choose_device(name: str) -> torch.device:
    """Resolve "auto", "cpu", "cuda" or "cuda:N".

    "auto" is the GPU if it can be used. One that is there and cannot be is said aloud.

    Raises:
        ConfigError: the device is unknown, not there or of no use to this PyTorch; the message says what
            is possible.
    """
    if name == "auto":
        lacks = cuda.unusable(0)
        if lacks is not None and lacks.there:
            log.warning(
                "device 'auto' is the CPU here: %s. For the GPU: %s", lacks.why, lacks.remedy
            )
        return torch.device("cuda" if lacks is None else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        msg = f"unknown device {name!r}; use auto, cpu, cuda or cuda:N"
        raise ConfigError(msg) from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        msg = f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N"
        raise ConfigError(msg)
    lacks = cuda.unusable(device.index or 0)
    if lacks is not None:
        way = f"{lacks.remedy}, or use device cpu" if lacks.remedy else "use cpu or auto"
        msg = f"device {name!r} was asked for, but {lacks.why}; {way}"
        raise ConfigError(msg)
    return device


def choose_dtype(name: DType, device: torch.device, kernels: str | None) -> DType:
    """Resolve "auto": bfloat16 where it costs less than float32.

    Args:
        name: a dtype, or "auto".
        device: where it is to be computed.
        kernels: why own kernels do not serve bfloat16 on this CPU; None: they do. They multiply it as
            it is or in float32, and read half the bytes either way.
    """
    if name != "auto":
        return name
    return "bfloat16" if slower_dtype(device, kernels) is None else "float32"


def slower_dtype(device: torch.device, kernels: str | None) -> str | None:
    """Why "auto" is not bfloat16 here, as a clause that names the slower way; None: it is."""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < _BF16_MAJOR:
            return (
                f"the GPU has compute capability {major}.{minor}, and bfloat16 products need 8.0; float32 "
                "is used, which reads twice the bytes (float16 does not, but numbers of some models are "
                "too large for it)"
            )
    if device.type != "cpu" or has_native_bf16() or kernels is None:
        return None
    return (
        "the processor has no bfloat16 products (AVX512-BF16, AMX or Arm BF16) and there are no own "
        f"kernels ({kernels}); float32 is used, which reads twice the bytes"
    )


def has_native_bf16() -> bool:
    """Whether this processor has bfloat16 dot products (AVX512-BF16, AMX or Arm BF16)."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


@functools.cache
def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on; OMP_NUM_THREADS, the usual way to say fewer, counts."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, environment.openmp_threads() or cores)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated: GPU memory, or RAM within this process's control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free_ram = _meminfo("MemAvailable")
    limit = _cgroup_room()
    return free_ram if limit is None else min(free_ram, limit)


def used_memory(device: torch.device) -> int:
    """Bytes that this process holds on the device."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    try:
        return resident_memory(os.getpid())
    except OSError:
        return 0


def resident_memory(pid: int) -> int:
    """Bytes of RAM that a process holds.

    Raises:
        OSError: there is no such process, or the system is not Linux.
    """
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held on the device so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    # Linux hands ru_maxrss down from the process that started this one, so its own mark comes first.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_cached(device: torch.device) -> None:
    """Give back GPU memory that PyTorch keeps for later; elsewhere the system has it already."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def give_back(device: torch.device) -> None:
    """`free_cached`, after what nobody refers to but itself, as dropped engines do, was collected (GPU)."""
    if device.type == "cuda":
        gc.collect()
        free_cached(device)


def forget_peak(device: torch.device) -> None:
    """Let `peak_memory` begin anew on a GPU; what the system counts goes on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def rows_of_logits(device: torch.device, vocab_size: int) -> int:
    """Rows of float32 logits that may exist at the same time on a GPU; products want many.

    As many as a pass of 1,024 tokens has at a vocabulary of 262 thousand, and of a small GPU's memory no
    more than 1/64. The target's pick and the drafters' one after the other use the same memory.
    """
    total: int = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(_LOGIT_BYTES, total // _LOGIT_SHARE) // (4 * vocab_size))


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that a GPU's memory is used up.

    PyTorch's allocator has a class of its own for that; the driver, which keeps captured graphs, says it
    in words.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError) or "out of memory" in str(found).lower():
            return True
        found = found.__cause__ or found.__context__
    return False


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return 4 << 30


def _cgroup_room() -> int | None:
    base = Path("/sys/fs/cgroup")
    try:
        limit = (base / "memory.max").read_text().strip()
        used = int((base / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)
