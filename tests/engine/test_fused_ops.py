"""The pass of fewer operators, for GPUs: on a CPU in float64, where all is the reference, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import ops
from paceline.attention import choose
from paceline.attention.base import PagedAttend
from paceline.core.batch import ForwardOutput
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.fused import fuse
from paceline.engine.fused_ops import OpsPass
from paceline.engine.runner import ModelRunner
from paceline.kv.pool import KVPool
from paceline.layers.decoder import Decoder
from paceline.models import CausalLM
from tests import tiny, tiny_drafters
from tests.engine.harness import engine, request
from tests.engine.test_fused import CPU, PAGE, network, passes, pool_for

F64 = torch.float64


def laid_open(net: CausalLM) -> Decoder:
    decoder = net.decoder()
    assert isinstance(decoder, Decoder)
    return decoder


def both(
    net: CausalLM, pools: list[KVPool], name: str, taps: tuple[int, ...]
) -> tuple[ForwardOutput, ForwardOutput]:
    """A pass by operators over one pool, and by modules over the other."""
    backend, _ = choose(pools[0].layout, CPU, F64, PAGE)
    batch = passes()[name]
    with torch.inference_mode():
        found = OpsPass(laid_open(net), pools[0], backend).forward(batch, taps)
        backend.plan(batch)
        return found, net(batch, PagedAttend(backend, pools[1], batch), taps)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_it_is_what_the_modules_give(tmp_path: Path, variant: str) -> None:
    """Hidden states, taps and the pool: trees and prompts; biases, norms of heads, ropes, odd sizes."""
    loaded = network(tiny.write_variant(tmp_path, variant), F64)
    last = loaded.config.num_layers - 1
    for name in passes():
        for taps in ((), (0,), (last, 0), (last,)):
            pools = [pool_for(loaded, F64) for _ in range(2)]
            found, want = both(loaded.net, pools, name, taps)
            assert torch.equal(found.hidden, want.hidden), name
            assert (found.aux is None) == (want.aux is None) == (not taps)
            if found.aux is not None and want.aux is not None:
                assert torch.equal(found.aux, want.aux), (name, taps)
            assert torch.equal(pools[0].k, pools[1].k)
            assert torch.equal(pools[0].v, pools[1].v)


def test_what_nobody_wrote_spoils_nothing(tmp_path: Path) -> None:
    """NaN in all slots but those of the prefixes: neither read nor overwritten."""
    loaded = network(tiny.write_tiny(tmp_path, "qwen3"), F64)
    pools = [pool_for(loaded, F64) for _ in range(2)]
    batch = passes()["verify"]
    known = torch.zeros(pools[0].num_slots, dtype=torch.bool)
    for row, count in enumerate(batch.prefix_lens.tolist()):
        place = torch.arange(count)
        known[batch.pages[row, place // PAGE].long() * PAGE + place % PAGE] = True
    for pool in pools:
        pool.k[:, :, ~known] = pool.v[:, :, ~known] = torch.nan
    found, want = both(loaded.net, pools, "verify", ())
    live = int(batch.cu_q[-1])
    assert found.hidden[:live].isfinite().all()
    assert torch.equal(found.hidden[:live], want.hidden[:live])
    known[batch.slots[:live]] = True
    assert pools[0].k[:, :, known].isfinite().all()
    assert pools[0].k[:, :, ~known][:, :, :-1].isnan().all(), "but for the dummy slot"


def test_a_layer_is_six_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the pass is for: nothing between two products but one operator."""
    loaded = network(tiny.write_tiny(tmp_path, "qwen3"), F64)
    counts: Counter[str] = Counter()

    def counted(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return op(*args)

        return call

    for name in (
        "rms_norm",
        "add_rms_norm",
        "rope",
        "rope_write",
        "silu_mul",
        "kv_write",
        "linear",
        "linear_add_rms_norm",
        "linear_swiglu",
    ):
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    pool = pool_for(loaded, F64)
    backend, _ = choose(pool.layout, CPU, F64, PAGE)
    OpsPass(laid_open(loaded.net), pool, backend).forward(passes()["verify"], ())
    n = loaded.config.num_layers
    assert counts == {
        "rms_norm": 1,
        "rope_write": n,
        "linear": n,
        "linear_swiglu": n,
        "linear_add_rms_norm": 2 * n,
    }


def test_a_pool_on_a_gpu_gets_it(tmp_path: Path) -> None:
    """With the reasons where there is none; PyTorch keeps its threads, as all of it is PyTorch's."""
    loaded = network(tiny.write_tiny(tmp_path, "llama"), F64)
    pools = [pool_for(loaded, F64) for _ in range(2)]
    backend, _ = choose(pools[0].layout, CPU, F64, PAGE)
    pools[0].device = torch.device("cuda")  # as far as the choice can tell
    assert isinstance(fuse(loaded.net.decoder(), pools[0], backend), OpsPass)
    assert fuse("its layers are special", pools[0], backend) == "its layers are special"
    assert fuse(loaded.net.decoder(), pools[0], backend, (9,)) == "a tapped layer does not exist"
    assert isinstance(fuse(loaded.net.decoder(), pools[1], backend), str)
    found, want = (ModelRunner(loaded.net, pool, backend, aux_layers=(1,)) for pool in pools)
    assert isinstance(found._fused, OpsPass)
    assert not found.fused
    outputs = [runner.forward(passes()["extend"]) for runner in (found, want)]
    assert torch.equal(outputs[0].hidden, outputs[1].hidden)
    assert torch.equal(outputs[0].aux, outputs[1].aux)


@pytest.mark.parametrize("causal", [False, True])
def test_a_draft_pass_has_windows_and_tails_of_its_own(tmp_path: Path, *, causal: bool) -> None:
    """Its layers' sites go to attention as they are."""
    base = tiny.write_tiny(tmp_path / "target", "llama")
    extra = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
        "is_causal": causal,
    }
    folder = tiny_drafters.write_dflash(tmp_path / "drafter", base, **extra)
    eng = engine(base, Engine.build, method="dflash", model=str(folder))
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    for name in ("a", "b"):
        eng.add(request(name, [7, 8, 9, 7, 8, 9, 7], params))
    for _ in range(5):
        eng.step()
    block = eng._proposer._drafter._block
    runtime, rows = block._runtime, torch.tensor([0, 1])
    assert any(layer.attention.site.window == 6 for layer in block.net.layers)
    with torch.inference_mode():
        assert runtime._fused[block.net] is None
        want = block._hidden(rows, block.roots(rows))
        runtime._fused[block.net] = OpsPass(block.net.decoder(), runtime._pool, runtime._backend)
        assert torch.equal(block._hidden(rows, block.roots(rows)), want)
