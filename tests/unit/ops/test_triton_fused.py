"""Fused Triton kernels on a CPU: in the interpreter, in a process of their own; and who is chosen."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from paceline.ops.dispatch import explain
from paceline.ops.reference import fused as reference
from paceline.ops.triton.refusal import refusal
from tests.interpreter import linux, passes

OPS = ("rms_norm", "add_rms_norm", "rope", "rope_write", "silu_mul", "kv_write", "context_write")


@pytest.mark.slow
@linux
def test_fused_kernels_in_the_interpreter() -> None:
    """The kernels compute what `ops/reference` defines, as far as a CPU can tell."""
    passes("triton_fused")


@pytest.mark.slow
@linux
def test_the_context_kernel_in_the_interpreter() -> None:
    """It computes what `ops/reference/context.py` defines."""
    passes("triton_context")


def chosen(op: str, device_type: str, dtype: torch.dtype) -> str:
    return next(c.name for c in explain(op, device_type, dtype) if c.chosen)


@linux
@pytest.mark.parametrize("op", OPS)
def test_a_gpu_gets_the_kernels_and_a_cpu_never(op: str) -> None:
    """In the three types that they serve; float64 is the reference's everywhere."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert chosen(op, "cuda", dtype) == "triton"
        assert chosen(op, "cpu", dtype) != "triton"
    assert chosen(op, "cuda", torch.float64) == "torch"


@linux
def test_a_compiler_gets_the_reference() -> None:
    """As one graph: training compiles whole networks."""
    from paceline.ops.triton import fused

    x, slots = torch.randn(2, 24), torch.tensor([1, 2])
    table = torch.randn(3, 8)

    def run(ops: ModuleType, x: Tensor) -> tuple[Tensor, ...]:
        cache, weight = x.new_zeros(2, 1, 4, 8), x.new_ones(24)
        normed, stream = ops.add_rms_norm(ops.rms_norm(x, weight, 1e-5), x, weight, 1e-5)
        q = ops.rope_write(normed, slots, table, slots, cache[0], cache[1], None, 1e-5)
        heads = stream.view(2, 3, 8)
        ops.kv_write(cache[0], cache[1], slots[:1] - 1, heads[:1, :1], heads[:1, 1:2])
        return (*ops.rope(heads, q, slots, table), ops.silu_mul(q.flatten(1)), cache)

    compiled = torch.compile(lambda x: run(fused, x), backend="eager", fullgraph=True)
    for found, want in zip(compiled(x), run(reference, x), strict=True):
        assert torch.equal(found, want)


def test_refusals_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type, GPU, package: `doctor` repeats them."""
    assert refusal(torch.float64) == "it is for bfloat16, float16 and float32, not for float64"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "8.0 or more; this one has 7.5" in (refusal(torch.float16) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in (refusal(torch.float16) or "")
