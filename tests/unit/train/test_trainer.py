"""The loop: resumed to the same losses, stopped in time, saved whole, and it learns."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError, ModelError, PacelineError
from paceline.core.request import SamplingParams
from paceline.draft import dflash_checkpoint
from paceline.models import LoadedModel, checkpoint
from paceline.train import state as states
from paceline.train import trainer as module
from paceline.train.accept import HeldOut, engine_accept
from paceline.train.curve import read
from paceline.train.packing import Geometry, Packer
from paceline.train.settings import TrainSettings
from paceline.train.shards import Doc, Shards
from paceline.train.trainer import CURVE, STATE, Parts, Trainer
from tests.engine.harness import STOP_ID, engine, request, run
from tests.unit.train.making import BLOCK, new_task, random_docs, write_docs

CPU = torch.device("cpu")
SETTINGS = TrainSettings(
    steps=12, lr=1e-3, warmup=3, log_steps=1, evals=2, batch_rows=1, row_tokens=64, anchors=6
)


def silent(*_: object) -> None:
    """No progress is shown."""


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Random sequences, some held out."""
    return write_docs(tmp_path / "docs", random_docs(30))


@pytest.fixture
def make(target: LoadedModel, shards: Shards) -> Callable[..., Trainer]:
    """A trainer in a folder; further arguments are settings."""

    def trainer(folder: Path, data: Shards = shards, **options: Any) -> Trainer:
        folder.mkdir(exist_ok=True)
        settings = replace(SETTINGS, **options)
        geometry = Geometry(
            rows=settings.batch_rows,
            row_tokens=settings.row_tokens,
            anchors=settings.anchors,
            targets=BLOCK - 1,
        )
        task = new_task(target)
        parts = Parts(
            task=task,
            packer=Packer(data, geometry, settings.seed),
            held_out=HeldOut(data, geometry, 3, CPU),
            device=CPU,
            folder=folder,
            save_drafter=lambda to: dflash_checkpoint.save(task.net, to, dtype=torch.float64),
            data={"answers": len(data)},
            progress=silent,
        )
        return Trainer(parts, settings)

    return trainer


def losses(folder: Path) -> list[tuple[object, ...]]:
    """What the record says about training, without times."""
    keys = ("step", "loss", "norm", "lr")
    return [tuple(x[k] for k in keys) for x in read(folder / CURVE) if x["kind"] == "train"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = states.load(folder / STATE)
    assert found is not None
    return found[0]


def stop_after(trainer: Trainer, steps: int, how: type[BaseException]) -> None:
    """Let the trainer end in the midst of things."""
    step = trainer._step

    def counted(*args: Any) -> Any:
        if trainer.journey.step == steps:
            raise how
        return step(*args)

    trainer._step = counted


class Killed(BaseException):
    """As sudden as a signal."""


def test_a_stopped_run_goes_on_to_the_same_losses(
    tmp_path: Path, make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by the clock, by Ctrl-C and by a kill: losses, norms and weights as without."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert make(whole).run(None)

    ticks = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
        assert not make(parted).run(deadline=float(next(ticks)) + 12)
    first = states.load_journey(parted / STATE).step
    assert 0 < first < 6

    interrupted = make(parted)
    stop_after(interrupted, 7, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(None)
    assert states.load_journey(parted / STATE).step == 7

    killed = make(parted)
    stop_after(killed, 9, Killed)
    with pytest.raises(Killed):
        killed.run(None)
    assert states.load_journey(parted / STATE).step == 7, "steps 8 and 9 are lost"
    assert len(losses(parted)) == 9

    last = make(parted)
    assert len(losses(parted)) == 7, "lines of lost steps are dropped"
    assert last.run(None)
    assert losses(parted) == losses(whole)
    assert len(losses(whole)) == 12
    expected = weights(whole)
    assert all(torch.equal(x, expected[name]) for name, x in weights(parted).items())


def test_a_full_disk_leaves_the_last_state(
    tmp_path: Path,
    make: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The state and the drafters of before stay whole; the error says so; nothing half is left."""
    folder = tmp_path / "run"
    assert make(folder).run(None)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != CURVE}
    write = checkpoint.write

    def full(path: Path, specs: Any, tensors: Any, metadata: Any = None) -> None:
        def cut() -> Any:
            yield next(iter(tensors))
            raise OSError(28, "No space left on device")

        write(path, specs, cut(), metadata)

    monkeypatch.setattr(checkpoint, "write", full)
    trainer = make(folder, steps=14)
    with caplog.at_level(logging.ERROR), pytest.raises(PacelineError, match="make room"):
        trainer.run(None)
    assert "the state of step 14 could not be saved" in caplog.text
    assert "the one of before is kept" in caplog.text
    assert "the drafter of step 14 could not be saved" in caplog.text
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != CURVE}
    assert after == before
    monkeypatch.undo()
    assert make(folder, steps=14).run(None)


def test_a_killed_write_leaves_the_last_state(
    tmp_path: Path, make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the new file takes the old one's place: the old one is read."""
    folder = tmp_path / "run"
    make(folder).run(None)
    before = weights(folder)

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        states.save(folder / STATE, {"x": torch.zeros(3)}, states.Journey())
    monkeypatch.undo()
    assert all(torch.equal(x, before[name]) for name, x in weights(folder).items())


def test_states_of_other_data_and_damaged_ones_are_refused(
    tmp_path: Path, make: Callable[..., Trainer]
) -> None:
    """A resumed run needs its answers, and a file that is one of ours."""
    folder = tmp_path / "run"
    make(folder).run(None)
    other = write_docs(tmp_path / "other", random_docs(20))
    with pytest.raises(ConfigError, match="a resumed run needs the same answers"):
        make(folder, data=other)
    checkpoint.write(folder / STATE, [], [])
    with pytest.raises(ModelError, match="is no training state of this version"):
        make(folder)
    (folder / STATE).write_bytes(b"x" * 50)
    with pytest.raises(ModelError, match="damaged"):
        make(folder)


def test_minutes_become_steps_once_the_speed_is_known(
    tmp_path: Path, make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided once and kept by later calls; a call with other minutes decides anew."""
    clock = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.01 * next(clock))
    monkeypatch.setattr(module, "_CALIBRATE", (2, 5))
    folder = tmp_path / "run"
    first = make(folder, steps=None, train_minutes=0.02)
    assert first.journey.steps is None
    assert first.run(None)
    total = first.journey.steps
    assert total is not None
    assert 6 < total < 60
    assert first.journey.step == total
    assert make(folder, steps=None, train_minutes=0.02).finished
    more = make(folder, steps=None, train_minutes=0.04)
    assert not more.finished
    assert more.run(None)
    assert more.journey.steps > total


def test_a_loss_that_is_no_number_ends_the_run(
    tmp_path: Path, make: Callable[..., Trainer]
) -> None:
    """The message says what to change."""
    trainer = make(tmp_path / "run")
    with torch.no_grad():
        trainer._parts.task.net.norm.weight[0] = torch.nan
    with pytest.raises(PacelineError, match="training cannot go on"):
        trainer.run(None)


@pytest.mark.slow
def test_it_learns_and_the_engine_accepts(
    tmp_path: Path, target: LoadedModel, target_folder: Path, make: Callable[..., Trainer]
) -> None:
    """On a few answers the loss falls, and the engine then accepts more than one draft a step."""
    prompts = [[(11 * i * j) % 60 + 3 for i in range(6)] for j in range(1, 5)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain = engine(target_folder, method="none", num_speculative_tokens=0)
    done = run(plain, [request(str(i), p, params) for i, p in enumerate(prompts)])
    docs = [
        Doc(token_ids=[*p, *done[str(i)].tokens], num_prompt=len(p), held_out=held_out)
        for i, p in enumerate(prompts)
        for held_out in (False, True)
    ]
    data = write_docs(tmp_path / "answers", docs)
    folder = tmp_path / "run"
    trainer = make(
        folder,
        data,
        steps=150,
        lr=4e-3,
        warmup=10,
        batch_rows=2,
        row_tokens=96,
        anchors=40,
        log_steps=10,
    )
    assert trainer.run(None)
    curve = losses(folder)
    assert curve[-1][1] < 0.3 * curve[0][1]
    measured = [x["accept_length"] for x in read(folder / CURVE) if x["kind"] == "held_out"]
    eng = engine(
        target_folder, method="dflash", model=str(folder / "best"), num_speculative_tokens=BLOCK - 1
    )
    real = engine_accept(eng, prompts, max_new_tokens=40, stop_ids=frozenset({STOP_ID}))
    assert max(measured) > 2.0
    assert real > 2.0
