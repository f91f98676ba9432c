"""Whether a GPU can be used by the PyTorch that is installed, and if not, why and what to do.

A driver may be older than PyTorch's CUDA, and a build has kernels for some GPUs alone: PyTorch itself then
finds no device, or fails at the first kernel without saying what would help.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_CODE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)$")
_DRIVER = re.compile(r"found version (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """Why there is no such GPU for us."""

    why: str  # a clause: what is, and what is possible
    remedy: str  # a clause: what would make it usable; empty: nothing that we know
    there: bool  # the machine has a GPU, or may have one


def unusable(index: int) -> Unusable | None:
    """Why this process cannot compute on a GPU; None: it can.

    Args:
        index: of the GPU, from 0.
    """
    if not torch.cuda.is_available():
        return _no_device()
    count = torch.cuda.device_count()
    if index >= count:
        return Unusable(why=f"this machine has {count} CUDA device(s)", remedy="", there=False)
    return None if torch.version.hip is not None else _no_kernels(index)


def runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether a build's code runs on a GPU.

    Machine code (`sm_XY`) runs from X.Y up to the end of X; an intermediate one (`compute_XY`) is compiled
    for every GPU from X.Y on. With an `a` both are for that GPU alone, with an `f` for its major version.

    Args:
        code: as `torch.cuda.get_arch_list` names it.
        capability: the GPU's compute capability, major and minor.
    """
    found = _CODE.match(code)
    if found is None:
        return False
    kind, major, minor, only = found.groups()
    made_for = int(major), int(minor)
    if only == "a":
        return capability == made_for
    same_major = capability[0] == made_for[0]
    return capability >= made_for and (same_major or (kind == "compute" and not only))


def _no_kernels(index: int) -> Unusable | None:
    """A GPU that the build has nothing for, so that the first kernel would fail."""
    codes = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(index)
    if not codes or any(runs_on(code, capability) for code in codes):
        return None
    known = sorted({tuple(map(int, m.group(2, 3))) for m in map(_CODE.match, codes) if m})
    if not known:  # names of a kind that we do not know prove nothing
        return None
    build = (
        "a newer" if capability > known[-1] else "an older" if capability < known[0] else "another"
    )
    return Unusable(
        why=(
            f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name(index)}, whose "
            f"compute capability is {_dotted(capability)}; this build serves {_listed(known)}"
        ),
        remedy=f"install {build} PyTorch build that serves it",
        there=True,
    )


def _no_device() -> Unusable:
    """Of what PyTorch says when it is made to begin: what is missing."""
    if torch.version.cuda is None and torch.version.hip is None:
        return Unusable(
            why="this PyTorch was built without CUDA",
            remedy="install one that has it",
            there=False,
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip()
    else:
        said = "No CUDA GPUs are available"
    if "too old" in said:
        found = _DRIVER.search(said)
        upto = f", which serves CUDA up to {_version(int(found[1]))}," if found else ""
        return Unusable(
            why=f"the NVIDIA driver{upto} is too old for this PyTorch's CUDA {torch.version.cuda}",
            remedy="install a newer driver or a PyTorch build for an older CUDA",
            there=True,
        )
    if "no NVIDIA driver" in said:
        return Unusable(
            why="no CUDA device is found, and no NVIDIA driver",
            remedy="install the driver if there is a GPU",
            there=False,
        )
    if "No CUDA GPUs" in said or "No HIP GPUs" in said:
        return Unusable(why="no CUDA device is found", remedy="", there=False)
    return Unusable(
        why=f"no CUDA device can be used (PyTorch says: {said.splitlines()[0] if said else 'nothing'})",
        remedy="mend what it names",
        there=True,
    )


def _version(number: int) -> str:
    """A CUDA version as drivers tell it: 12040 is 12.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _dotted(capability: Sequence[int]) -> str:
    return ".".join(str(n) for n in capability)


def _listed(known: Sequence[Sequence[int]]) -> str:
    return ", ".join(_dotted(k) for k in known)
