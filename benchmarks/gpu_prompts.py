"""Measures a prompt's attention on a GPU over lengths that were never seen before, and again.

What it answers: milliseconds of a layer's attention the first time that a prompt has some length, and any
other time, and how much memory of the host a new length takes for good; by the library's own choice for a
mask (cuDNN on Hopper), by its other kernels, and as it is served (`attention/flash.py`). Shapes are
Qwen3-8B's: a chunk of 1 to 2,048 tokens behind up to 2,048 cached ones. Keys are gathered from pages in all
of them. Results are compared with one another before anything is timed.

    python benchmarks/gpu_prompts.py --out benchmarks/results/h200-prompts.json

Needs PyTorch, nothing else. Takes half a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from paceline.attention import sdpa
from paceline.attention.flash import FlashPrompts
from paceline.bench.machine import Json, machine, source, versions
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.core.device import used_memory
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool

CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MOST, WARM = 2048, 20
SITE = AttnSite(index=0, window=None, tail="mask", scale=DIM**-0.5)
Attend = Callable[[Tensor, ForwardBatch], Tensor]


def batch_of(tokens: int, cached: int) -> ForwardBatch:
    """A chunk of a prompt behind cached tokens, in pages from the pool's beginning."""

    def whole(*values: int) -> Tensor:
        return torch.tensor(values, device=CUDA)

    places = torch.arange(cached, cached + tokens, device=CUDA)
    pages = -(-(cached + tokens) // PAGE)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        num_rows=1,
        q_len=tokens,
        rows=whole(0),
        token_ids=torch.zeros_like(places),
        positions=places,
        slots=places,
        prefix_lens=whole(cached),
        cu_q=whole(0, tokens),
        tail_lens=whole(tokens),
        mask=None,
        pages=torch.arange(pages, device=CUDA, dtype=torch.int32)[None],
    )


def host_bytes() -> int:
    """What this process holds, after what was freed went back to the system."""
    torch.cuda.synchronize()
    ctypes.CDLL(None).malloc_trim(0)
    return used_memory(torch.device("cpu"))


def timed(attend: Attend, lengths: list[tuple[int, int]]) -> list[float]:
    """Milliseconds of each length."""
    found = []
    for tokens, cached in lengths:
        q, batch = (
            torch.randn(tokens, Q_HEADS, DIM, device=CUDA, dtype=DTYPE),
            batch_of(tokens, cached),
        )
        torch.cuda.synchronize()
        started = time.perf_counter()
        attend(q, batch)
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return found


def main() -> None:
    """Compare, measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--lengths", type=int, default=60, help="new lengths of each way")
    parser.add_argument("--out", type=Path, help="where the record goes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need an NVIDIA GPU, and PyTorch finds none; run it on one")
    pool = KVPool(Heads(KV_HEADS, DIM), 1, 2 * MOST // PAGE, PAGE, DTYPE, CUDA)
    for cache in (pool.k, pool.v):
        cache.normal_()
    flash, library = FlashPrompts(), sdpa.SdpaAttention()
    others = sdpa._KERNELS  # noqa: SLF001 (what is served leaves cuDNN out)

    def by_library(kernels: list[SDPBackend]) -> Attend:
        def attend(q: Tensor, batch: ForwardBatch) -> Tensor:
            sdpa._KERNELS = kernels  # noqa: SLF001 (the same)
            return library.heads(SITE, q, pool, batch)

        return attend

    ways: dict[str, Attend] = {
        "library's choice for a mask": by_library([SDPBackend.CUDNN_ATTENTION, *others]),
        "library without cuDNN": by_library(others),
        "served": lambda q, batch: flash.heads(SITE, q, pool, batch),
    }
    q, batch = torch.randn(300, Q_HEADS, DIM, device=CUDA, dtype=DTYPE), batch_of(300, 77)
    results = [attend(q, batch).float() for attend in ways.values()]
    for one in results[1:]:
        off = float((one - results[0]).norm() / results[0].norm())
        if not off < 1e-2:
            raise SystemExit(f"the results differ by {off:.1e}")  # noqa: EM102
    rng, rows = random.Random(0), list[Json]()  # noqa: S311 (lengths, no secrets)
    for name, attend in ways.items():
        lengths = [(rng.randrange(1, MOST + 1), rng.randrange(MOST)) for _ in range(args.lengths)]
        timed(attend, [(5 + i, 3) for i in range(WARM)])
        before = host_bytes()
        first = timed(attend, lengths)
        grown = host_bytes() - before
        again = timed(attend, lengths)
        whole = timed(attend, [(MOST, 0)] * 10)
        row: dict[str, Json] = {
            "way": name,
            "new_length_ms": round(statistics.median(first), 3),
            "known_length_ms": round(statistics.median(again), 3),
            "chunk_of_2048_ms": round(statistics.median(whole), 3),
            "host_kb_a_new_length": round(grown / 1e3 / len(lengths), 1),
        }
        rows.append(row)
        print(row)
    record = {
        "schema": "paceline-prompts/1",
        "machine": machine(CUDA),
        "source": source(),
        "versions": versions(),
        "what": "one layer, one row: gathering keys and attending, host clock; medians",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
