"""PACELINE_LOG_OPS: the last line before a crash names the operator and what it was given."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import ops
from paceline.core.config import DraftConfig, EngineConfig
from paceline.ops import calls, dispatch
from paceline.ops.cpu.native import native
from paceline.ops.packed import pack

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from tests.engine.harness import engine, request, run
from paceline.core.request import SamplingParams
from pathlib import Path

eng = engine(Path(sys.argv[1]), dtype=sys.argv[2], method="none", page_size=4, max_len=32)
run(eng, [request("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))])
"""


@pytest.fixture
def announcing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the variable had been set when the process started."""
    monkeypatch.setattr(calls, "ANNOUNCES", True)
    monkeypatch.setattr(dispatch, "_chosen", {})


def lines(folder: Path, dtype: str, flag: str) -> list[str]:
    """What a process writes to stderr that nobody has set up logging for."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), dtype],
        env={**os.environ, "PACELINE_LOG_OPS": flag},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stderr.splitlines()


def test_every_operator_of_a_pass_is_named(tiny_checkpoint) -> None:
    """Module by module: dtype, shape and implementation of each call, in order."""
    found = lines(tiny_checkpoint("llama"), "float64", "1")
    found = [line for line in found if not line.startswith("pack_dense")]  # while loading
    names = [line.split(" ")[0] for line in found]
    layer = ["linear", "rope", "kv_write", "attention", "linear", "add_rms_norm", "linear"]
    layer += ["silu_mul", "linear"]
    whole = ["embedding", "rms_norm", *layer, "add_rms_norm", *layer, "add_rms_norm"]
    assert names[: len(whole)] == whole
    assert names[len(whole)] == "linear_f32"
    assert found[0].startswith("embedding [torch] int64[3] cpu, float64[97, 64] cpu")
    assert any(
        re.match(r"linear \[.*\] float64\[3, 64\] cpu, float64\[128, 64\]", x) for x in found
    )
    assert any("attention [ReferenceAttention] float64[3, 4, 16]" in line for line in found)


@pytest.mark.skipif(native() is None, reason="needs own kernels")
def test_a_pass_in_one_native_call_is_named(tiny_checkpoint) -> None:
    """Where all layers are one call into C, that call is what must be named."""
    found = lines(tiny_checkpoint("llama"), "bfloat16", "1")
    assert any(re.match(r"stack \[own\] bfloat16\[3, 64\] cpu, int64\[3\]", line) for line in found)
    assert any(re.match(r"linear_f32 \[packed\] bfloat16\[1, 64\] cpu, packed", x) for x in found)


def test_nothing_is_said_unasked(tiny_checkpoint) -> None:
    """Without the variable no operator is wrapped."""
    assert lines(tiny_checkpoint("llama"), "float64", "0") == []
    function = dispatch.implementation("silu_mul", "cpu", torch.float64)
    assert calls.announced("silu_mul", "torch", function) is function


@pytest.mark.usefixtures("announcing")
def test_a_call_is_said_before_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The line stands there when the operator never returns."""
    with caplog.at_level(logging.DEBUG, logger="paceline.ops.calls"):
        with pytest.raises(RuntimeError):
            ops.linear(torch.zeros(2, 5), torch.zeros(3, 4))
        with pytest.raises(IndexError):
            ops.embedding(torch.tensor([9]), torch.zeros(3, 4))
    assert "float32[2, 5] cpu, float32[3, 4] cpu, None" in caplog.messages[0]
    assert caplog.messages[1] == "embedding [torch] int64[1] cpu, float32[3, 4] cpu"


def test_arguments_are_described_in_a_few_words() -> None:
    """Strides where they matter, packed weights by their kind, long values cut."""
    assert calls.describe(torch.zeros(3, 2).T) == "float32[2, 3] cpu strides [1, 2]"
    assert calls.describe(1e-5) == "1e-05"
    assert len(calls.describe(EngineConfig(draft=DraftConfig()))) == 40
    weight = pack(torch.zeros(16, 32), "auto", torch.float32)
    assert calls.describe(weight).startswith("packed[16, 32] (" if native() else "float32[16, 32]")
