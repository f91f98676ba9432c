"""The batch-invariant kernels in Triton's interpreter; run by tests/unit/ops/test_triton_invariance.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own. The interpreter has no
products of bfloat16, so everything is in float16; the same grid in both runs on a GPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import triton

from paceline.attention.base import PagedAttend
from paceline.attention.reference import ReferenceAttention
from paceline.attention.triton_invariant import InvariantTritonAttention
from paceline.engine.fused_ops import OpsPass
from paceline.engine.invariance import InvariantProduct, _head, _head_weight
from paceline.kv.layout import Heads
from paceline.ops import dispatch
from paceline.ops.cpu import native
from paceline.ops.triton import attention_invariant, product_invariant
from paceline.ops.triton.product_invariant import Tiles
from tests import attention_grid as grid
from tests import fused_grid, invariance_grid, tiny
from tests.engine.test_fused import PAGE, network, passes, pool_for
from tests.oracle import attention as oracle
from tests.tolerance import close, error

UNIT = 32  # keys, of two tiles: borders within a few programs' time
CASES = {
    name: case
    for name, case in grid.cases(unit=UNIT).items()
    if case.tiles is grid.SMALL and case.dim == 64 and "of 70" not in name and "of 64" not in name
}
SCENES = [name for name in oracle.SCENES if "one long" not in name and "just 64" not in name]
SITES = oracle.every_site(64)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", fused_grid.poison(torch.empty))
    monkeypatch.setattr(attention_invariant, "TILE", 16)
    monkeypatch.setattr(attention_invariant, "UNIT_TILES", 2)


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("number, name", list(enumerate(CASES)))
def test_kernels_are_the_definition(number: int, name: str) -> None:
    """Every kind of pass, at borders of pages, tiles and units; NaN in all that nobody sees."""
    case = CASES[name]
    made = case.scene()
    found = grid.attend_by(InvariantTritonAttention(bool(number % 2)), made, case)
    want = grid.definition(made, case.site)
    live = int(made.batch.cu_q[-1])
    assert (found[live:] == 0).all()
    assert close(found[:live], want[:live])


@pytest.mark.parametrize("number, scene", list(enumerate(SCENES)))
def test_scenes_of_the_engine_and_its_drafters(number: int, scene: str) -> None:
    """Prompts and blocks, with a mask, a window or a causal tail: one site each of what others pass."""
    site = SITES[number % len(SITES)]
    made = oracle.build(scene, dtype=torch.float16, layout=Heads(1, 64), num_heads=2)
    case = grid.Case(rows=made.rows, window=site.window, causal_tail=site.tail == "causal")
    found = grid.attend_by(InvariantTritonAttention(number % 3 == 0), made, case)
    live = int(made.batch.cu_q[-1])
    assert (found[live:] == 0).all()
    assert close(found[:live], oracle.attend(made, site)[:live])


@pytest.mark.parametrize("window", [None, 21])
def test_a_token_has_one_set_of_bits(window: int | None) -> None:
    """Alone, as a node of chains and trees, in chunks, among others, split or not."""
    of, other = (
        invariance_grid.text(45, dtype=torch.float16, kv_heads=1, group=3, seed=seed)
        for seed in (0, 1)
    )
    invariance_grid.bits_are_one_set(
        of, other, device="cpu", unit=UNIT, step=23, window=window, every=3 if window else 2
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_a_product_has_one_set_of_bits(bias: bool) -> None:
    """One row, a block of rows and more; sizes that fill no block."""
    options = {"dtype": torch.float16, "device": "cpu", "bias": bias}
    invariance_grid.product_bits(40, 70, (1, 3, 67), **options)


def test_parts_of_k_are_joined_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as are joined at once and one more; a part that is short."""
    tiles = Tiles(block_n=32, block_k=16, num_stages=2, split=3)
    monkeypatch.setattr(product_invariant, "tiles_for", lambda *_: tiles)
    monkeypatch.setattr(product_invariant, "_JOINED_ROWS", 5)
    options = {"dtype": torch.float16, "device": "cpu", "bias": False}
    invariance_grid.product_bits(48, 104, (1, 5, 6), **options)


def test_a_pass_is_what_the_modules_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with biases, its head too: a verify and a prompt by these kernels."""
    monkeypatch.setattr(native, "loaded", lambda: "as on a GPU: nothing is packed")
    monkeypatch.setattr(dispatch, "_chosen", {})
    folder = tiny.write_tiny(tmp_path, "qwen2", head_dim=64)
    loaded = network(folder, torch.float16, "bf16")
    decoder = loaded.net.decoder()
    assert not isinstance(decoder, str)
    for batch in passes().values():
        pools = [pool_for(loaded, torch.float16) for _ in range(2)]
        backend = ReferenceAttention()
        backend.plan(batch)
        with torch.inference_mode():
            mine = OpsPass(decoder, pools[0], InvariantTritonAttention(), InvariantProduct)
            found = mine.forward(batch, ()).hidden
            want = loaded.net(batch, PagedAttend(backend, pools[1], batch)).hidden
            head = partial(_head, _head_weight(loaded.net))
            live = int(batch.cu_q[-1])
            assert error(found[:live], want[:live]) < 3e-3
            assert error(head(found[:live]), loaded.net.head(want[:live])) < 3e-3
        for a, b in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
            assert error(a[:, :, :-PAGE], b[:, :, :-PAGE]) < 3e-3


def test_a_node_that_fails_spoils_no_other() -> None:
    """NaN in a query or key of one branch stays there, although branches share a program."""
    of = invariance_grid.text(40, dtype=torch.float16, kv_heads=1, group=2)
    plain = invariance_grid.attend([invariance_grid.run(of, 35, 1)], device="cpu", masked=False)
    tree = invariance_grid.bushy(of, 34, 2, 3)
    found = invariance_grid.attend([tree], device="cpu")
    assert torch.equal(found[0][35], plain[0][35])
