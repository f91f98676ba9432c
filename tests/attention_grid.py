"""Passes for the paged kernels of `ops/triton`, and what they must give: `ops/reference` in float64.

Used in Triton's interpreter (`tests/interpreted`) and on a GPU (`tests/gpu/test_attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.attention.base import PagedAttend
from paceline.attention.reference import ReferenceAttention
from paceline.attention.triton import TritonAttention
from paceline.core.batch import AttnSite, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.triton.grid import Tiles
from tests.oracle import attention as oracle
from tests.oracle.attention import (
    LAYER,
    NUM_LAYERS,
    Row,
    Scene,
    block,
    causal,
    chain,
    growth,
    tree,
)

# Borders of tiles (32), units (64) and pages within a few hundred keys.
SMALL = Tiles(block_m=16, block_n=32, unit=64, num_warps=4, num_stages=2, last_joins=True)
BY_KERNEL = replace(SMALL, last_joins=False)  # units are joined by the second kernel
WHOLE = replace(SMALL, unit=8192)  # a row is one unit
LONGER = replace(SMALL, least=32)  # less than a tile at the end of a row goes to the unit before


def binary(nodes: int) -> list[int]:
    """Parents of a tree in which every node has two children."""
    return [-1, *((i - 1) // 2 for i in range(1, nodes))]


def star(nodes: int) -> list[int]:
    """Parents of a tree of siblings."""
    return [-1] + [0] * (nodes - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows of a pass and the layer that attends."""

    rows: list[Row]
    kv_heads: int = 1
    group: int = 3
    dim: int = 64
    page_size: int = 16
    window: int | None = None
    causal_tail: bool = False
    tiles: Tiles | None = SMALL
    num_dead: int = 3
    dtype: torch.dtype = field(default=torch.float16)

    def scene(self, device: str = "cpu") -> Scene:
        """The pass in a pool where what nobody sees is NaN."""
        made = oracle.lay_out(
            self.rows,
            ForwardMode.BLOCK,
            dtype=self.dtype,
            layout=Heads(self.kv_heads, self.dim),
            num_heads=self.kv_heads * self.group,
            page_size=self.page_size,
            num_dead=self.num_dead,
        )
        return oracle.on(made, device)

    @property
    def site(self) -> AttnSite:
        """The layer."""
        return AttnSite(
            index=LAYER,
            scale=self.dim**-0.5,
            window=self.window,
            tail="causal" if self.causal_tail else "mask",
        )


def attend(made: Scene, case: Case) -> Tensor:
    """What the kernels give."""
    return attend_by(TritonAttention(case.tiles), made, case)


def attend_by(backend: TritonAttention, made: Scene, case: Case) -> Tensor:
    """What a backend that may have served other passes gives."""
    backend.plan(made.batch)
    return PagedAttend(backend, made.pool, made.batch).heads(case.site, made.q, made.k, made.v)


def definition(made: Scene, site: AttnSite) -> Tensor:
    """What `ops/reference` gives in float64, on the CPU."""
    cpu = oracle.on(made, "cpu")
    old = cpu.pool
    pool = KVPool(
        old.layout, NUM_LAYERS, old.num_pages, old.page_size, torch.float64, torch.device("cpu")
    )
    pool.k.copy_(old.k)
    pool.v.copy_(old.v)
    backend = ReferenceAttention()
    backend.plan(cpu.batch)
    attention = PagedAttend(backend, pool, cpu.batch)
    return attention.heads(site, cpu.q.double(), cpu.k.double(), cpu.v.double())


def at_borders(*borders: int) -> list[int]:
    """Numbers of keys just before, at and after each border."""
    return [n + d for n in borders for d in (-1, 0, 1)]


def cases(unit: int) -> dict[str, Case]:
    """Kinds of passes and their difficult places, for units of `unit` keys."""
    ragged = [tree(70, binary(11)), tree(3, binary(1)), tree(unit - 4, star(7)), tree(0, binary(4))]
    return {
        "decode at borders": Case(rows=[causal(n, 1) for n in (0, 15, 16, 31, *at_borders(unit))]),
        "decode by one program a row": Case(
            rows=[causal(n, 1) for n in (5, unit + 9, 3 * unit)], tiles=WHOLE
        ),
        "chains at borders": Case(
            rows=[chain(n, 5) for n in (29, unit - 3, 2 * unit - 5)], page_size=4
        ),
        "chain without mask": Case(rows=[causal(unit - 2, 6), causal(40, 3)], group=4),
        "ragged trees": Case(rows=ragged, kv_heads=2),
        "ragged trees, causal tail": Case(rows=ragged, causal_tail=True),
        "short rests belong to the unit before": Case(
            rows=[chain(n, 4) for n in (0, 20, *at_borders(unit - 4, unit + 28), 3 * unit + 9)],
            tiles=LONGER,
        ),
        "short rests, joined by a kernel": Case(
            rows=[chain(n, 2) for n in at_borders(unit + 29, 2 * unit + 29)],
            tiles=replace(LONGER, last_joins=False),
        ),
        "tails that begin before the queries": Case(
            rows=[growth(unit - 5), growth(3), growth(2 * unit - 40), tree(unit - 2, star(7))],
            kv_heads=2,
        ),
        "chains that begin before the queries": Case(
            rows=[causal(unit - 3, 3, earlier=9), causal(7, 2, earlier=40), causal(unit, 1)],
        ),
        "joined by a kernel": Case(rows=ragged, kv_heads=2, tiles=BY_KERNEL),
        "more units than a round of joining": Case(
            rows=[chain(n * unit + 5, 2) for n in (16, 33, 0)], group=2
        ),
        "tree of 70, two words of bits": Case(
            rows=[tree(unit + 31, binary(70)), tree(3, star(66)), tree(2 * unit, binary(9))],
            group=1,
        ),
        "tree of 64, the last bit of a word": Case(rows=[tree(unit - 33, star(64))], group=1),
        "tree of 40": Case(rows=[tree(unit + 31, binary(40)), tree(9, star(2))], group=2),
        "block that sees itself": Case(rows=[block(unit - 7, 16), block(8, 16)], group=2),
        "block, causal tail": Case(rows=[block(45, 16)], group=2, causal_tail=True),
        "window in prefix and tail": Case(
            rows=[tree(unit + 20, binary(9)), tree(2, binary(9))], window=25
        ),
        "window of one": Case(rows=[chain(unit, 4), chain(33, 4)], window=1),
        "window, causal, no mask": Case(
            rows=[causal(2 * unit, 4), causal(0, 7)], window=unit, causal_tail=True
        ),
        "window, positions ahead of places": Case(
            rows=[Row(prefix=unit - 2, depths=[40, 41, 42], sees=[[0], [0, 1], [0, 1, 2]])],
            window=2,
        ),
        "heads of 96": Case(rows=[tree(unit + 1, binary(6)), tree(1, binary(2))], dim=96),
        "heads of 128": Case(rows=[tree(unit + 1, binary(6))], dim=128, group=4),
        "page of one": Case(rows=[chain(unit + 5, 3), chain(11, 3)], page_size=1),
        "many dead tokens": Case(rows=[chain(9, 2)], num_dead=9, kv_heads=2, group=1),
    }
