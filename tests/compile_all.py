"""Compiles every kernel of `ops/triton` for a Hopper GPU on a machine that has none; no tests here.

Run by tests/unit/ops/test_triton_compiles.py, without assertions (`python -O -m tests.compile_all`): the
small launches are made with a driver that knows a target and no device, so nothing is computed, and what
they compare is not there. What the interpreter takes and the compiler does not is found so: types, layouts,
shapes of products, instructions. The last line says what failed, or was not compiled.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from paceline.core.tree import Selection
from paceline.ops.reference import tree as reference
from paceline.ops.triton import overlap
from tests import small_launches, tree_grid

HOPPER = GPUTarget("cuda", 90, 32)


class Driver:
    """Has a target, and nothing else that compilation does not ask for."""

    class utils:  # noqa: N801 (Triton's name)
        """What a device is like."""

        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, _: int) -> None:
        pass

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def waits_first(ptx: str) -> bool:
    """Whether a kernel that overlaps waits for the one before, and touches no memory until then."""
    before, waits, _ = ptx.partition("griddepcontrol.wait")
    return bool(waits) and not re.search(r"\b(ld|st|red|atom)\.global|cp\.async", before)


def main() -> None:
    """Compile them all."""
    compiled: set[int] = set()
    failed: list[str] = []
    run, select = JITFunction.run, tree_grid.tree.select

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        try:
            made = run(self, *args, grid=grid, warmup=True, **options)
        except Exception as error:  # noqa: BLE001 (whatever a compiler throws)
            failed.append(f"{self.fn.__name__}: {error!r:.300}")
            return None
        compiled.add(id(self))
        if options.get("launch_pdl") and not waits_first(made.asm["ptx"]):
            failed.append(f"{self.fn.__name__} reads or writes before the kernel before has ended")
        return made

    def selected(*args: Any) -> Selection:
        """The kernel is compiled; what follows needs a selection."""
        select(*args)
        tree, rows, num_tokens, caps = args
        found = reference.select(tree, rows, num_tokens, caps)
        lack = num_tokens - found.node.shape[0]
        return Selection(
            node=functional.pad(found.node, (0, lack), value=-1),
            mask=functional.pad(found.mask, (0, 0, 0, lack)),
            cu_q=found.cu_q,
        )

    driver.set_active(Driver())
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(tree_grid.tree, "select", selected),
        mock.patch.object(torch.cuda, "device_of", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.testing, "assert_close"),
        mock.patch.object(
            overlap, "_options", lambda _, when: {"OVERLAPS": when, "launch_pdl": True}
        ),
    ):
        every = small_launches.kernels()
        for part in small_launches.PARTS.values():
            part("cpu")
    left_out = [name for name, kernel in every.items() if id(kernel) not in compiled]
    found = {
        "kernels": len(every),
        "failed": failed,
        "left_out": left_out,
        "parts": list(small_launches.PARTS),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
