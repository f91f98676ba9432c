"""Every registered attention backend against loops, in every kind of pass, on the CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.attention import BACKENDS
from paceline.attention.base import PagedAttend
from paceline.kv.layout import Heads
from tests.oracle import attention as oracle

# Absolute, for outputs of order 1. Half-precision inputs are exact in the oracle; a backend may
# round its probabilities to the inputs' dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CPU = torch.device("cpu")


def served(name: str, layout: Heads, page_size: int) -> list[torch.dtype]:
    """The dtypes that a backend serves; a backend for other devices serves none here."""
    refuses = BACKENDS.get(name)().refuses
    return [dtype for dtype in TOLERANCE if refuses(layout, CPU, dtype, page_size) is None]


@pytest.mark.parametrize("scene", list(oracle.SCENES))
@pytest.mark.parametrize("backend", BACKENDS.names())
def test_backend_sees_what_the_loops_see(backend: str, scene: str) -> None:
    """Decode, verify, draft steps, blocks and prefill; windows, tail rules, NaN in what is hidden."""
    layout, page_size = Heads(2, 16), 4
    for dtype in served(backend, layout, page_size):
        for site in oracle.every_site(layout.head_dim):
            made = oracle.build(scene, dtype=dtype, layout=layout, page_size=page_size)
            attention = BACKENDS.get(backend)()
            attention.plan(made.batch)
            attend = PagedAttend(attention, made.pool, made.batch)
            out = attend.heads(site, made.q, made.k, made.v)
            assert out.dtype == dtype
            want = oracle.attend(made, site)
            assert torch.allclose(out.double(), want, rtol=0, atol=TOLERANCE[dtype]), (dtype, site)


@pytest.mark.parametrize("backend", BACKENDS.names())
def test_a_plan_serves_one_pass_after_another(backend: str) -> None:
    """One backend object lives as long as its runner; nothing of the last pass may stay."""
    layout, page_size = Heads(3, 8), 8
    for dtype in served(backend, layout, page_size):
        attention = BACKENDS.get(backend)()
        for name in [*oracle.SCENES, *reversed(oracle.SCENES)]:
            made = oracle.build(name, dtype=dtype, layout=layout, num_heads=9, page_size=page_size)
            attention.plan(made.batch)
            attend = PagedAttend(attention, made.pool, made.batch)
            site = oracle.every_site(layout.head_dim)[0]
            out = attend.heads(site, made.q, made.k, made.v)
            want = oracle.attend(made, site)
            assert torch.allclose(out.double(), want, rtol=0, atol=TOLERANCE[dtype]), (dtype, name)


def test_the_cpu_is_served() -> None:
    """Every dtype that the engine offers has a backend on a CPU."""
    for dtype in TOLERANCE:
        assert any(dtype in served(name, Heads(3, 64), 16) for name in BACKENDS)
