"""Graphs on a CUDA device: 1 to 256 requests at a time, 10,000 steps, and never more memory than stated."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.device import free_memory, used_memory
from paceline.engine.beforehand import capture_usual
from paceline.engine.engine import Engine
from paceline.engine.graphs import CudaRecorder, Recorded, Step
from paceline.engine.step_tensors import StepTensors
from tests import network_cases, tiny, tiny_drafters
from tests.engine.harness import engine
from tests.sweep import LONGEST, Said, endless, jobs_of, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LEVELS = (1, 2, 5, 13, 33, 100, 256)
NETWORKS: list[tuple[str, Mapping[str, Any]]] = [
    ("none", {}),
    ("suffix", {}),
    ("ddtree", {}),
    ("merged", {"parts": ("suffix", "dflash")}),
]


def built(base: Path, **own: Any) -> Engine:
    """An engine on the GPU."""
    return engine(base, Engine.build, **{"device": "cuda", "max_len": LONGEST + 8, **own})


def settled() -> None:
    """What nobody holds is free again."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("method, own", NETWORKS, ids=[network_cases.case_id(*c) for c in NETWORKS])
def test_one_to_256_requests_at_a_time(tmp_path: Path, method: str, own: Mapping[str, Any]) -> None:
    """They join, leave, are aborted and preempted: eager plain decoding's tokens, a graph each step."""
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5)
    jobs = jobs_of(random.Random(3), 320)
    plain = built(base, method="none", graphs="off", max_rows=64)
    expected = serve(plain, jobs, 64, random.Random(1), aborts=0.0, at_once=True).finished
    assert plain.report()["num_graphs"] == 0
    draft: dict[str, Any] = {"method": method, **own}
    if method in {"ddtree", "merged"}:
        texts = [[*job.prompt, *expected[job.name]] for job in jobs[:12]]
        build = tiny_drafters.BUILDERS[network_cases.network_in(method, own)]
        draft["model"] = str(build(tmp_path / "drafter", base, texts, steps=60))
    # Too few pages for 256 rows.
    eng = built(base, max_rows=256, num_pages=900, graphs="beforehand", **draft)
    said = Said()
    for level in LEVELS:
        some = jobs if level == LEVELS[-1] else jobs[: 3 * level]
        said = serve(eng, some, level, random.Random(level), at_once=level > 50)
        said.check(expected)
        assert len(said.finished) > len(some) // 2
    report = eng.report()
    assert report["num_steps_without_graph"] == 0
    assert method == "none" or report["num_preemptions"] > 0, "who drafts needs more pages"
    assert said.most_running > 128, "the widest rung was in use"
    assert method == "none" or report["spec_decode_num_accepted_tokens"] > 0


def host_memory() -> int:
    """Bytes of RAM that this process holds."""
    return used_memory(torch.device("cpu"))


def test_ten_thousand_steps_take_no_memory(tmp_path: Path) -> None:
    """Of the GPU or the host: what is held after 2,000 steps is held after 10,000; by own kernels."""
    base = tiny.write_tiny(tmp_path / "target", "llama", seed=1, head_dim=64)
    folder = str(tiny_drafters.write_dflash(tmp_path / "drafter", base))
    own = {"graphs": "beforehand", "num_pages": 36, "dtype": "bfloat16"}
    eng = built(base, method="ddtree", model=folder, **own)
    rng = random.Random(2)
    sent = endless(eng, 2_000, 4, rng, 0)
    settled()
    graphs = eng.report()["num_graphs"]
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_memory()
    sent = endless(eng, 8_000, 4, rng, sent)
    settled()
    now = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host_memory()
    report = eng.report()
    assert sent > 1_000
    assert report["num_block_steps"] + report["num_extend_steps"] > 9_500
    assert report["num_preemptions"] > 0
    assert report["num_graphs"] == graphs
    assert report["num_steps_without_graph"] == 0
    assert now[0] <= held[0] + (1 << 20)
    assert now[1] <= held[1] + (4 << 20)
    assert now[2] <= held[2] + (24 << 20)


def test_weights_pool_and_graphs_stay_within_the_stated_memory(tmp_path: Path) -> None:
    """With a pool that the budget bounds: what PyTorch holds at most, and what the device lacks."""
    wide = {"head_dim": 128, "num_key_value_heads": 4}  # a pool that weighs more than the rest
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5, **wide)
    folder = str(tiny_drafters.write_dflash(tmp_path / "drafter", base))
    own = {"method": "ddtree", "model": folder, "max_rows": 64, "max_len": 240}
    own |= {"graphs": "beforehand"}
    built(base, memory_gb=20.0, **own)  # loads what is loaded once in a process, and counts as used
    settled()
    ample = built(base, memory_gb=20.0, **own)
    (note,) = [note for note in ample.notes if note.startswith("KV pool: ")]
    used = float(re.search(r"- ([\d.]+) GB in use", note)[1])
    aside = float(re.search(r"- ([\d.]+) GB for CUDA graphs", note)[1])
    most, pool = ample._scheduler._allocator.num_pages, ample._parts.target.pool
    page_bytes = 4 * (pool.k.nbytes + pool.v.nbytes) / pool.num_slots  # the drafter's come on top
    del ample, pool
    settled()
    held, free = torch.cuda.memory_reserved(), free_memory(torch.device("cuda"))
    budget = used + aside + most * page_bytes / 2 / 1e9 + 0.01
    torch.cuda.reset_peak_memory_stats()
    eng = built(base, memory_gb=budget, **own)
    assert eng._scheduler._allocator.num_pages < most, "the budget bounds the pool"
    jobs = jobs_of(random.Random(3), 200)
    serve(eng, jobs, 64, random.Random(1), at_once=True)
    report = eng.report()
    assert report["num_steps_without_graph"] == 0
    assert report["graph_bytes"] <= eng._parts.graph_bytes
    assert torch.cuda.max_memory_reserved() <= budget * 1e9
    settled()
    assert free - free_memory(torch.device("cuda")) + held <= budget * 1e9


class Scarce(CudaRecorder):
    """On a device that has no memory in the midst of the first captures."""

    failures = 2

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        if not self.failures:
            return super().record(step)
        self.failures -= 1

        def greedy() -> StepTensors:
            tensors = step()
            if torch.cuda.is_current_stream_capturing():
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            return tensors

        return super().record(greedy)


def test_no_memory_in_the_midst_of_a_capture(tmp_path: Path) -> None:
    """Smaller steps are captured, the larger ones when they come; streams and tokens are as before."""
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5)
    jobs = jobs_of(random.Random(3), 24)
    plain = built(base, method="none", graphs="off")
    expected = serve(plain, jobs, 4, random.Random(1), aborts=0.0).finished
    eng = built(base, method="suffix")
    graphs = eng._launcher.graphs
    graphs._recorder = Scarce(torch.device("cuda"))
    stream = torch.cuda.current_stream()
    note = capture_usual(graphs)
    assert torch.cuda.current_stream() == stream
    assert "there was no memory for steps of" in note
    made = graphs.num_captured
    assert 0 < made < len(graphs.ladder.usual(graphs.kinds))
    serve(eng, jobs, 4, random.Random(2)).check(expected)
    assert eng.report()["num_steps_without_graph"] == 0
    assert graphs.num_captured > made
