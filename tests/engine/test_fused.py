"""The fused pass: every bit that the modules give, for every architecture; and when it steps back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import models, ops
from paceline.attention import choose
from paceline.attention.base import PagedAttend
from paceline.attention.reference import ReferenceAttention
from paceline.core.batch import ForwardBatch, ForwardMode
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.fused import FusedPass, fuse
from paceline.engine.runner import ModelRunner
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import native
from paceline.ops.cpu.threads import kernel_threads
from tests import tiny, tiny_drafters
from tests.engine.harness import engine, request, run

needs_native = pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")
CPU = torch.device("cpu")
PAGE = 4


def network(folder: Path, dtype: torch.dtype, weights: str = "auto") -> models.LoadedModel:
    files = models.resolve(str(folder))
    return models.load(files, device=CPU, dtype=dtype, weights=weights)


def pool_for(loaded: models.LoadedModel, dtype: torch.dtype) -> KVPool:
    config = loaded.config
    layout = Heads(config.num_kv_heads, config.head_dim)
    pool = KVPool(layout, config.num_layers, 20, PAGE, dtype, "cpu")
    gen = torch.Generator().manual_seed(0)
    pool.k.copy_(torch.randn(pool.k.shape, generator=gen))
    pool.v.copy_(torch.randn(pool.v.shape, generator=gen))
    return pool


def passes() -> dict[str, ForwardBatch]:
    """A verify of two trees with a dead token at the end, and two chunks of prompts."""
    pages = torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(2, 10).int()

    def slots(row: int, first: int, count: int) -> list[int]:
        return [int(pages[row, p // PAGE]) * PAGE + p % PAGE for p in range(first, first + count)]

    verify = ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=2,
        q_len=4,
        rows=torch.arange(2),
        token_ids=torch.tensor([5, 6, 7, 8, 9, 10, 0]),
        positions=torch.tensor([9, 10, 10, 11, 3, 4, 0]),
        slots=torch.tensor([*slots(0, 9, 4), *slots(1, 3, 2), -1]),
        prefix_lens=torch.tensor([9, 3]),
        cu_q=torch.tensor([0, 4, 6]),
        tail_lens=torch.tensor([4, 2]),
        mask=torch.tensor([[1], [3], [5], [11], [1], [3], [0]]),
        pages=pages,
    )
    extend = ForwardBatch(
        mode=ForwardMode.EXTEND,
        num_rows=2,
        q_len=17,
        rows=torch.arange(2),
        token_ids=torch.arange(22) + 3,
        positions=torch.tensor([*range(17), *range(6, 11)]),
        slots=torch.tensor([*slots(0, 0, 17), *slots(1, 6, 5)]),
        prefix_lens=torch.tensor([0, 6]),
        cu_q=torch.tensor([0, 17, 22]),
        tail_lens=torch.tensor([17, 5]),
        mask=None,
        pages=pages,
    )
    return {"verify": verify, "extend": extend}


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_fused_is_bit_by_bit_what_the_modules_give(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    """Hidden states, taps and the pool, for biases, norms of heads, ropes and odd sizes."""
    loaded = network(tiny.write_variant(tmp_path, variant), dtype)
    for weights in ("auto", "4bit"):
        if weights == "4bit":
            loaded = network(tmp_path, dtype, weights)
        backend, _ = choose(
            Heads(loaded.config.num_kv_heads, loaded.config.head_dim), CPU, dtype, PAGE
        )
        pools = [pool_for(loaded, dtype) for _ in range(2)]
        fused = fuse(loaded.net.decoder(), pools[0], backend)
        if not isinstance(fused, FusedPass):
            assert loaded.config.head_dim % 16 or "not packed" in fused, fused
            continue
        for name, batch in passes().items():
            last = loaded.config.num_layers - 1
            for taps in ((), (0,), (last, 0)):
                with torch.inference_mode():
                    found = fused.forward(batch, taps)
                    backend.plan(batch)
                    attend = PagedAttend(backend, pools[1], batch)
                    want = loaded.net(batch, attend, taps)
                assert torch.equal(found.hidden, want.hidden), name
                assert (found.aux is None) == (want.aux is None)
                if found.aux is not None and want.aux is not None:
                    assert torch.equal(found.aux, want.aux), (name, taps)
                # The last slot is a dummy, whose content nobody sees.
                for a, b in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
                    assert torch.equal(a[:, :, :-1], b[:, :, :-1]), name


@needs_native
def test_some_variant_is_fused(tmp_path: Path) -> None:
    """The test above must not pass because nothing is fused."""
    loaded = network(tiny.write_tiny(tmp_path, "llama"), torch.bfloat16)
    backend, _ = choose(
        Heads(loaded.config.num_kv_heads, loaded.config.head_dim), CPU, torch.bfloat16, PAGE
    )
    assert isinstance(
        fuse(loaded.net.decoder(), pool_for(loaded, torch.bfloat16), backend), FusedPass
    )


def test_what_can_not_be_fused_says_why(tmp_path: Path) -> None:
    """float64, another backend, another pool dtype, plain matrices: module by module."""
    folder = tiny.write_tiny(tmp_path, "llama")
    wide = network(folder, torch.float64)
    backend, _ = choose(
        Heads(wide.config.num_kv_heads, wide.config.head_dim), CPU, torch.float64, PAGE
    )
    assert fuse(wide.net.decoder(), pool_for(wide, torch.float64), backend) == (
        "attention is not an own CPU kernel"
    )
    narrow = network(folder, torch.bfloat16)
    assert isinstance(
        fuse(narrow.net.decoder(), pool_for(narrow, torch.bfloat16), ReferenceAttention()), str
    )
    if native() is None:
        return
    own, _ = choose(
        Heads(narrow.config.num_kv_heads, narrow.config.head_dim), CPU, torch.bfloat16, PAGE
    )
    reason = fuse(narrow.net.decoder(), pool_for(narrow, torch.float32), own)
    assert reason == "the pool holds float32, the network bfloat16"
    reason = fuse(narrow.net.decoder(), pool_for(narrow, torch.bfloat16), own, (99,))
    assert reason == "a tapped layer does not exist"
    plain = narrow.net.layers[0].mlp.down
    assert not isinstance(plain.weight, torch.Tensor)
    exact = plain.weight.plain()
    assert exact is not None
    plain.set_weight(exact)
    reason = fuse(narrow.net.decoder(), pool_for(narrow, torch.bfloat16), own)
    assert reason == "a matrix is not packed for own kernels"


@needs_native
def test_the_runner_runs_the_fused_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In service the modules of the layers are not called at all."""
    loaded = network(tiny.write_tiny(tmp_path, "llama"), torch.bfloat16)
    pool = pool_for(loaded, torch.bfloat16)
    backend, _ = choose(pool.layout, CPU, torch.bfloat16, PAGE)
    runner = ModelRunner(loaded.net, pool, backend)

    def never(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(ops, "linear", never)
    out = runner.forward(passes()["verify"])
    assert out.hidden.shape == (7, loaded.config.hidden_size)
    assert out.aux is None


@needs_native
@pytest.mark.parametrize("convolved", [False, True])
def test_a_draft_pass_is_fused_too(tmp_path: Path, *, convolved: bool) -> None:
    """Bit by bit what its modules give; a layer with convolutions runs module by module."""
    base = tiny.write_tiny(tmp_path / "target", "llama")
    extra = tiny_drafters.DFLASH2 if convolved else {}
    folder = tiny_drafters.write_dflash(tmp_path / "drafter", base, **extra)
    eng = engine(base, Engine.build, method="dflash", model=str(folder), dtype="bfloat16")
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    for name in ("a", "b"):
        eng.add(request(name, [7, 8, 9, 7, 8, 9, 7], params))
    for _ in range(5):
        eng.step()
    block = eng._proposer._drafter._block
    runtime, rows = block._runtime, torch.tensor([0, 1])
    assert isinstance(runtime._fused[block.net], FusedPass) != convolved
    with torch.inference_mode():
        found = block._hidden(rows, block.roots(rows))
        runtime._fused[block.net] = None
        assert torch.equal(found, block._hidden(rows, block.roots(rows)))


@needs_native
def test_a_step_keeps_torch_to_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the layers are one call; its kernels have all threads, and all is as before after."""
    base = tiny.write_tiny(tmp_path, "llama")
    for dtype, inside in (("bfloat16", 1), ("float64", 3)):
        eng = engine(base, Engine.build, method="none", dtype=dtype, threads=3)
        seen = []
        forward = eng._launcher._target.forward

        def spied(*args: Any, forward: Any = forward, seen: list[Any] = seen) -> Any:
            seen.append((torch.get_num_threads(), kernel_threads()))
            return forward(*args)

        monkeypatch.setattr(eng._launcher._target, "forward", spied)
        run(eng, [request("a", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))])
        assert set(seen) == {(inside, 3)}
        assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
