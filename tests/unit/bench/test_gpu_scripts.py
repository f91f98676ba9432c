"""`benchmarks/gpu_*.py` where there is no GPU: one message, and no record."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks"
# Those that are called by hand; the sweep of attention is called by the first.
SCRIPTS = sorted(p.stem for p in FOLDER.glob("gpu_*.py") if p.stem != "gpu_attention_sweep")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_it_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit code 2 before anything is made on a device."""
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2
    assert "need an NVIDIA GPU" in capsys.readouterr().err
    assert not out.exists()
