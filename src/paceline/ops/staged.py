"""A table on the device whose rows the host writes together: many rows change, one copy goes over.

A write from the host to a GPU costs some ten microseconds whatever its size, and a step with a
thousand rows has a hundred of them. So the host writes a mirror, and `apply` sends the rows that were
touched before the next step reads them. On a CPU the mirror *is* the table.

Only for tables that the device does not write itself: a row that is sent again would undo that.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StagedTable:
    """A [R, ...] tensor on a device with a host mirror.

    Attributes:
        tensor: what kernels read; up to date after `apply`.
        host: what the host writes, followed by `touch`.
    """

    def __init__(self, initial: Tensor, device: torch.device | str) -> None:
        """Start with `initial` ([R, ...] on the CPU) in both places."""
        self.host = initial
        on_host = torch.device(device).type == "cpu"
        self.tensor = initial if on_host else initial.to(device)
        self._touched: set[int] = set()
        self._apart = not on_host

    def touch(self, row: int) -> None:
        """Row `row` of `host` was written."""
        if self._apart:
            self._touched.add(row)

    def apply(self) -> None:
        """Bring the touched rows to the device, in one copy."""
        if not self._touched:
            return
        rows = torch.tensor(sorted(self._touched))
        self._touched.clear()
        device = self.tensor.device
        # The values are a new tensor: the host may go on writing its mirror at once.
        self.tensor.index_copy_(0, sent(rows, device), sent(self.host[rows], device))


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor's values on `device`; on a GPU the copy is started and nobody waits for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
