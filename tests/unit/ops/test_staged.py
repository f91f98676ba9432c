"""Tables that the host writes and the device reads."""

from __future__ import annotations

import torch

from paceline.ops.staged import StagedTable


def apart(rows: int) -> StagedTable:
    """A table whose mirror lies apart from it, as on a GPU."""
    table = StagedTable(torch.zeros(rows, 2, dtype=torch.int64), "cpu")
    table.host, table._apart = table.tensor.clone(), True
    return table


def test_on_a_cpu_there_is_one_copy() -> None:
    """Nothing is staged where the host's memory is the device's."""
    table = StagedTable(torch.zeros(3, 2), "cpu")
    table.host[1] = 5
    table.touch(1)
    assert table.tensor.tolist() == [[0, 0], [5, 5], [0, 0]]


def test_touched_rows_arrive_with_apply_and_no_others() -> None:
    """The device sees the newest value of a row that was touched, and only of those."""
    table = apart(4)
    for row, value in ((2, 7), (0, 3), (2, 9)):
        table.host[row] = value
        table.touch(row)
    table.host[3] = 1  # never touched
    assert table.tensor.sum() == 0
    table.apply()
    assert table.tensor.tolist() == [[3, 3], [0, 0], [9, 9], [0, 0]]


def test_the_mirror_may_change_after_apply() -> None:
    """What was sent is a copy: later writes wait for the next apply."""
    table = apart(2)
    table.host[0] = 1
    table.touch(0)
    table.apply()
    table.host[0] = 2
    table.apply()
    assert table.tensor[0].tolist() == [1, 1]
