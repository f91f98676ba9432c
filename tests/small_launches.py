"""Every kernel of `ops/triton` once or a few times, at sizes of a few rows; no tests here.

For tools that watch every access of a launch, which makes it slower by orders (`tools/sanitize.py`,
through tests/gpu/test_small_launches.py). Results are compared as well. Where there is no GPU the same
launches are compiled, which says whether a kernel is left out (tests/compile_all.py).
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from paceline.attention.triton_invariant import InvariantTritonAttention
from paceline.ops import triton as home
from paceline.ops.triton import attention_invariant
from paceline.ops.triton.embedding import embedding
from tests import (
    attention_grid,
    candidates_grid,
    context_grid,
    fused_grid,
    invariance_grid,
    linear_grid,
    pick_grid,
    tree_grid,
)
from tests.tolerance import close

HALF = torch.float16  # the interpreter has no products of bfloat16


def attention(device: str) -> None:
    """Ragged trees whose rows are joined by their last program or by a kernel, and a window."""
    cases = attention_grid.cases(unit=attention_grid.SMALL.unit)
    for name in ("ragged trees", "joined by a kernel", "window in prefix and tail", "heads of 96"):
        case = replace(cases[name], dtype=HALF)
        made = case.scene(device)
        live = int(made.batch.cu_q[-1])
        found = attention_grid.attend(made, case).cpu()
        assert close(found[:live], attention_grid.definition(made, case.site)[:live])


def bookkeeping(device: str) -> None:
    """Steps of few rows and of masks with two words: select, walk, move, commit."""
    rng = random.Random(3)
    torch.manual_seed(3)
    for most, rows in ((12, 5), (12, 5), (66, 2)):
        step = tree_grid.random_step(rng, most=most, rows=rows)
        batch, width = step.tree.token_ids.shape
        for tokens in (batch * width, batch + (batch * width - batch) // 2):  # all; the best half
            tree_grid.run(replace(step, num_tokens=tokens), rng, device)


def drafts(device: str) -> None:
    """Candidates, what is learned of them, trees, noise."""
    rng = random.Random(5)
    torch.manual_seed(5)
    for check in (
        candidates_grid.check_largest,
        candidates_grid.check_rank,
        candidates_grid.check_learn,
        candidates_grid.check_chain,
        candidates_grid.check_emitted,
        candidates_grid.check_growth,
        candidates_grid.check_noise,
    ):
        for _ in range(3):
            check(rng, device)


def between_products(device: str) -> None:
    """Embedding, norms, gates, rotations and cache writes, of widths that fit a block and that do not."""
    grid = fused_grid.Grid(device, HALF)
    for width in (17, 576):
        fused_grid.norms(grid, 3, width)
        fused_grid.added_norms(grid, 3, width)
        fused_grid.gates(grid, 3, width)
    shape = fused_grid.Shape(4, 2, 24)
    fused_grid.rotations(grid, 3, shape)
    fused_grid.writes(grid, 3, shape)
    for normed in (False, True):
        fused_grid.projections(grid, 3, shape, normed=normed)
    context_grid.writes(grid, 3, fused_grid.Shape(0, 2, 16))
    ids, table = torch.tensor([0, 8, 8, 3], device=device), grid.normal(9, 24)
    found = embedding(ids, table)
    assert torch.equal(found, table[ids])


def products(device: str) -> None:
    """Sizes that fit no block, a split whose last part is short or empty, either order of tiles."""
    sums = 3e-5 if device == "cuda" else linear_grid.RELATIVE[torch.float32]
    grid = linear_grid.Grid(device, HALF, sums)
    for size in ((130, 200), (49, 1000)):
        for tiles in (linear_grid.TILES[2], linear_grid.TILES[3]):
            for rows in (3, 17):
                linear_grid.products(grid, rows, size, tiles)
                linear_grid.norms(grid, rows, size, tiles)


def picks(device: str) -> None:
    """Every way that a row can take: a list, a list that is too short, parts in rounds, alone; sums."""
    from paceline.ops.triton import pick
    from paceline.ops.triton.peaks import log_sum_exp
    from paceline.sample.device import choose_by_kernels

    lists = pick.Tiling(block=64, part=128, room=64, most_k=32, walk_block=128)
    short = pick.Tiling(block=128, part=128, room=4, most_k=32, rounds=1, walk_block=64)
    alone = pick.Tiling(block=256, part=1024, most_k=0, rounds=0, walk_block=256)
    for tiling, size in ((lists, 300), (short, 97), (alone, 97)):
        for params in (pick_grid.MIX, pick_grid.EDITED):
            table = pick_grid.table_of(params, size, device)
            nodes = pick_grid.nodes_of(list(range(len(params))), device)
            logits = pick_grid.logits_of("ties", len(params), size, 1).to(device)
            with (
                mock.patch.object(pick, "tiling_for", return_value=tiling),
                mock.patch.object(pick, "_processors", return_value=1),
            ):
                found = choose_by_kernels(logits, nodes, table).tokens
            assert not pick_grid.differences(found, logits, nodes, table)
    logits = torch.randn(3, 2112, device=device)
    about, rest = log_sum_exp(logits)
    assert close((about.double() + rest.double()), logits.double().logsumexp(-1), 1e-6)


def invariant(device: str) -> None:
    """The same products and attention where a row's bits may not depend on its company."""
    cases = attention_grid.cases(unit=attention_invariant.TILE * attention_invariant.UNIT_TILES)
    for name, split in (("ragged trees", False), ("window in prefix and tail", True)):
        case = replace(cases[name], dtype=HALF)
        made = case.scene(device)
        live = int(made.batch.cu_q[-1])
        found = attention_grid.attend_by(InvariantTritonAttention(split), made, case).cpu()
        assert close(found[:live], attention_grid.definition(made, case.site)[:live])
    for n, k, bias in ((130, 200, True), (24, 2200, False)):  # the second in parts
        invariance_grid.product_bits(n, k, (1, 3), dtype=HALF, device=device, bias=bias)


PARTS: Mapping[str, Callable[[str], None]] = {
    part.__name__: part
    for part in (attention, bookkeeping, drafts, between_products, products, picks, invariant)
}


def kernels() -> dict[str, Any]:
    """Every kernel of `ops/triton`, by module and name."""
    found = {}
    for module in pkgutil.iter_modules(home.__path__):
        if module.name.endswith("_kernels"):
            held = importlib.import_module(f"{home.__name__}.{module.name}")
            for name, value in vars(held).items():
                if name.endswith("_kernel") and value.fn.__module__ == held.__name__:
                    found[f"{module.name}.{name}"] = value
    return found
