"""The attention kernels in Triton's interpreter, on the CPU; run by tests/unit/ops/test_triton.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own. The interpreter has no
products of bfloat16, so everything is in float16; the same grid in both runs on a GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from paceline.attention.triton import TritonAttention
from paceline.kv.layout import Heads
from tests import attention_grid as grid
from tests.oracle import attention as oracle
from tests.tolerance import close

CASES = grid.cases(unit=grid.SMALL.unit)
SITES = oracle.every_site(64)


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("name", list(CASES))
def test_kernels_are_the_definition(name: str) -> None:
    """Every kind of pass, at borders of pages, tiles and units; NaN in all that nobody sees."""
    case = CASES[name]
    made = case.scene()
    found = grid.attend(made, case)
    want = grid.definition(made, case.site)
    live = int(made.batch.cu_q[-1])
    assert (found[live:] == 0).all()
    assert close(found[:live], want[:live])


@pytest.mark.parametrize("number, scene", list(enumerate(oracle.BLOCK_SCENES)))
def test_scenes_of_the_engine_and_its_drafters(number: int, scene: str) -> None:
    """What the other backends are tested with, a few sites each: bounds of the loops, not speed."""
    for site in SITES[number % 4 :: 4]:
        made = oracle.build(scene, dtype=torch.float16, layout=Heads(1, 64), num_heads=2)
        case = grid.Case(rows=made.rows, window=site.window, causal_tail=site.tail == "causal")
        if "64" in scene:
            case = dataclasses.replace(case, tiles=grid.WHOLE)
        found = grid.attend(made, case)
        want = oracle.attend(made, site)
        live = int(made.batch.cu_q[-1])
        assert (found[live:] == 0).all()
        assert close(found[:live], want[:live])


@pytest.mark.parametrize("name", ["chains at borders", "ragged trees", "window in prefix and tail"])
def test_who_joins_changes_no_bit(name: str) -> None:
    """A row's last program or the second kernel: the same units, joined in the same order."""
    case = CASES[name]
    made = case.scene()
    last = grid.attend(made, case)
    assert torch.equal(last, grid.attend(made, dataclasses.replace(case, tiles=grid.BY_KERNEL)))


def test_counters_are_ready_for_the_next_pass() -> None:
    """Nobody zeroes them between passes: a row whose counter is off is never joined."""
    backend = TritonAttention(grid.SMALL)
    for name in ("ragged trees", "decode at borders", "ragged trees, causal tail", "ragged trees"):
        case = CASES[name]
        made = case.scene()
        found, want = grid.attend_by(backend, made, case), grid.definition(made, case.site)
        live = int(made.batch.cu_q[-1])
        assert close(found[:live], want[:live]), name
