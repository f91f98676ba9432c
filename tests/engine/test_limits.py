"""What a GPU cannot do is said with the ways on; what a CPU machine lacks is stubbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import MemoryBudgetError
from paceline.engine import build
from paceline.engine import engine as module
from paceline.engine.engine import Engine
from paceline.engine.limits import kernels_refused, within_memory
from tests import tiny
from tests.engine.harness import engine

GPU = torch.device("cuda", 0)
GB = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=5)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 24 GB of which 1 GB is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 * GB, 24 * GB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_own_kernels_are_missed_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU, a number format without kernels: why, what serves, what would have them."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    (note,) = kernels_refused(GPU, torch.bfloat16)
    for word in ("cuda:0", "8.0", "7.5", "PyTorch's operators serve", "device cpu"):
        assert word in note
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    (note,) = kernels_refused(GPU, torch.float64)
    assert "not for float64" in note
    assert "bfloat16 or float16" in note
    assert kernels_refused(torch.device("cpu"), torch.float64) == ()


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
)
def test_a_full_gpu_is_told_in_three_parts(error: RuntimeError) -> None:
    """What was to be done, what there is, what to do."""
    with pytest.raises(MemoryBudgetError) as raised, within_memory("loading it", GPU, "use less"):
        raise error
    assert str(raised.value) == (
        "loading it needs more memory than cuda:0 has left (1.00 GB are free of 24.00 GB); use less"
    )


@pytest.mark.parametrize(
    "device, error",
    [(GPU, RuntimeError("shapes differ")), (torch.device("cpu"), RuntimeError("out of memory"))],
)
def test_other_errors_pass(device: torch.device, error: RuntimeError) -> None:
    """A bug stays a bug, and a CPU's errors have their own words."""
    with pytest.raises(RuntimeError) as raised, within_memory("loading it", device, "use less"):
        raise error
    assert raised.value is error


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    "stage, asked, remedies",
    [
        ("weights", "loading {} in float64", ("smaller model", "device cpu")),
        ("trial", "a step of full size", ("max_rows", "chunk_size", "graphs off", "device cpu")),
        ("pool", "the KV pool", ("memory_gb", "max_rows", "device cpu")),
    ],
)
def test_each_part_of_a_start_says_what_did_not_fit(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    asked: str,
    remedies: tuple[str, ...],
) -> None:
    """The allocator's error in weights, trial or pool becomes a message of that part."""

    class Full:
        """Whatever is made has no memory."""

        def __init__(self, *_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def as_if_on_a_gpu(what: str, device: torch.device, remedy: str) -> Iterator[None]:
        assert device.type == "cpu"
        return within_memory(what, GPU, remedy)

    monkeypatch.setattr(module, "within_memory", as_if_on_a_gpu)
    if stage == "weights":
        monkeypatch.setattr(module, "load_target", Full)
    elif stage == "trial":
        monkeypatch.setattr(Engine, "_warm_up", Full)
    else:
        monkeypatch.setattr(build, "KVPool", Full)
    own = {"memory_gb": 20.0} if stage == "trial" else {}
    with pytest.raises(MemoryBudgetError) as raised:
        engine(model, Engine.build, method="none", **own)
    said = str(raised.value)
    assert said.startswith(asked.format(model))
    assert all(remedy in said for remedy in remedies)


def test_a_drafter_with_heads_of_its_own_says_who_serves_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target's backend refuses the drafter's heads, the notes say so."""
    from paceline.attention import choose
    from tests import tiny_drafters

    def picky(layout: Any, *others: Any, **named: Any) -> Any:
        backend, notes = choose(layout, *others, **named)
        return backend, (*notes, f"heads of {layout.num_heads} are nothing for it; using another")

    monkeypatch.setattr(build, "choose", picky)
    folder = tiny_drafters.write_dflash(tmp_path / "drafter", model, num_key_value_heads=1)
    eng = engine(model, Engine.build, method="dflash", model=str(folder))
    said = [note for note in eng.notes if "nothing for it" in note]
    assert any(note.startswith("drafter: heads of 1") for note in said)
