"""A step says once when it leaves Python to others, and nothing of it waits for that moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.batch import ForwardMode, ForwardOutput
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.plan import StepPlan
from paceline.ops.cpu import stack
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import native
from tests import tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine, request

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=2)


@pytest.mark.parametrize("gpu", [False, True], ids=["a CPU", "as on a GPU"])
@pytest.mark.parametrize("spec", ["none", "suffix"])
def test_each_step_that_computes_says_so_once(model: Path, spec: str, gpu: bool) -> None:
    """Prompts in chunks, plain steps, drafts, graphs; also one that only reads, before it does."""
    eng = engine(model, method=spec, chunk_size=4)
    if gpu:
        as_on_gpu(eng)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    eng.add(request("a", PROMPT, params))
    eng.add(request("b", PROMPT[:3], params))
    computed = eng._launcher.launch
    launched: list[StepPlan] = []

    def launch(*args: Any) -> object:
        launched.append(args[0])
        return computed(*args)

    eng._launcher.launch = launch
    read, reads = eng._reader.read, [0]

    def reader(*args: Any) -> object:
        reads[0] += 1
        return read(*args)

    eng._reader.read = reader
    only_read = 0
    while eng.has_work:
        said: list[int] = []
        before = len(launched), reads[0]
        eng.step(lambda said=said: said.append(reads[0]))
        assert said == [before[1]], "once, before results are read"
        only_read += len(launched) == before[0]
    assert {plan.mode for plan in launched} == {ForwardMode.EXTEND, ForwardMode.BLOCK}
    assert (only_read > 0) == (gpu and spec == "none"), "where results are read one step late"
    if gpu:
        assert eng.report()["num_graphs"] > 0


@pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")
def test_it_says_so_right_before_the_long_call(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operators before that call would hand Python to whoever is woken too early."""
    eng = engine(model, Engine.build, method="none", dtype="float32")
    assert eng._parts.target.fused
    events: list[str] = []
    run, announce = stack.Stack.run, stack.calls.announce

    def watched(*args: Any, **options: Any) -> ForwardOutput:
        events.append("layers")
        found = run(*args, **options)
        events.append("done")
        return found

    monkeypatch.setattr(stack.Stack, "run", watched)
    monkeypatch.setattr(stack.calls, "ANNOUNCES", True)
    monkeypatch.setattr(
        stack.calls,
        "announce",
        lambda name, *rest: events.append(name) if name == "stack" else announce(name, *rest),
    )
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    eng.add(request("a", PROMPT, params))
    while eng.has_work:
        eng.step(lambda: events.append("meanwhile"))
    assert events == ["layers", "stack", "meanwhile", "done"] * (len(events) // 4)
    assert len(events) == 2 * 4
