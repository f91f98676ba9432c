"""What a measurement was made on and with: processor or GPU, versions, the state of the source.

Pure look-ups, made for records and for `paceline doctor`.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import torch

import paceline
from paceline.core.device import cpu_flags, cpu_name, free_memory, usable_cores

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_PACKAGES = ("triton", "tokenizers", "safetensors", "numpy", "jinja2", "gguf")
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "asimd")


def versions() -> dict[str, Json]:
    """Versions of Python, PyTorch and what else decides results."""
    found: dict[str, Json] = {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine(device: torch.device) -> dict[str, Json]:
    """The processor and its memory; on a CUDA device also the GPU, its driver and clocks."""
    found: dict[str, Json] = {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "instructions": [f for f in _TELLING_FLAGS if f in cpu_flags()],
        "free_memory_gb": round(free_memory(torch.device("cpu")) / 1e9, 2),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "gpu_count": torch.cuda.device_count(),
            "gpu_free_memory_gb": round(free_memory(device) / 1e9, 2),
            "cuda": torch.version.cuda,
            **_driver(device),
        }
    return found


def source() -> dict[str, Json]:
    """Commit of the source tree that runs, and whether it has changes; None outside git."""
    folder = Path(paceline.__file__).resolve().parent
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    tracked = _output(["git", "-C", str(folder), "ls-files", "--", "__init__.py"])
    if not commit or not tracked:  # installed into somebody else's repository
        return {"commit": None, "dirty": None}
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "--", str(folder)])
    return {"commit": commit, "dirty": bool(changes)}


def _driver(device: torch.device) -> dict[str, Json]:
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.limit")
    text = _output(
        [
            "nvidia-smi",
            f"--id={device.index or 0}",
            "--query-gpu=" + ",".join(fields),
            "--format=csv,noheader",
        ]
    )
    values = [v.strip() for v in (text or "").split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _output(command: list[str]) -> str | None:
    """What a command prints; None where it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        ran = subprocess.run(  # noqa: S603 (git and nvidia-smi, with fixed arguments)
            [program, *command[1:]], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None
