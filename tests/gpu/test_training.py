"""Training on a CUDA device: bfloat16 and compiled networks against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import models
from paceline.draft.dflash_net import DFlashNet
from paceline.draft.eagle3_net import Eagle3Net
from paceline.models.base import CausalLM
from paceline.train import eagle3
from paceline.train.dflash import DFlashTask, initialise, new_config
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.losses import RowWeights
from paceline.train.optimizer import MasterAdamW
from paceline.train.packing import Geometry, Packer
from paceline.train.prefetch import Prefetch
from paceline.train.target import target_info
from paceline.train.trainer import Task
from tests import tiny
from tests.unit.train.making import random_docs, write_docs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WEIGHTS = RowWeights(gamma=4, dpace=True, alpha=0.5)
GEOMETRY = Geometry(rows=4, row_tokens=128, anchors=24, targets=7)


def dflash(target: CausalLM, *, compiled: bool) -> Task:
    """A DFlash drafter with the same first weights everywhere."""
    settings = DFlashSettings(layers=2, taps=(0, 1))
    net = DFlashNet(new_config(settings, target.config, 90), target_info(target))
    initialise(net, 1)
    return DFlashTask(target, net, WEIGHTS, compiled=compiled)


def eagle3_chains(target: CausalLM, *, compiled: bool) -> Task:
    """An EAGLE-3 drafter with the same first weights everywhere."""
    settings = Eagle3Settings(taps=(0, 1, 1), draft_vocab=64)
    net = Eagle3Net(eagle3.new_config(settings, target.config), target_info(target))
    net.set_vocabulary(torch.arange(10, 74))
    eagle3.initialise(net, target, 1)
    return eagle3.Eagle3Task(target, net, GEOMETRY.targets, WEIGHTS, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [dflash, eagle3_chains])
def test_losses_follow_the_cpus(
    tmp_path: Path, kind: Callable[..., Task], *, compiled: bool
) -> None:
    """Ten steps in bfloat16 on the GPU stay near ten steps in float64 on the CPU."""
    folder = tiny.write_tiny(tmp_path / "target", "llama", seed=3)
    shards = write_docs(tmp_path / "docs", random_docs(80))
    curves = []
    for device, dtype, how in (("cpu", torch.float64, False), ("cuda", torch.bfloat16, compiled)):
        target = models.load(
            models.resolve(str(folder)), device=torch.device(device), dtype=dtype, weights="bf16"
        ).net
        made = kind(target, compiled=how)
        optimizer = MasterAdamW(made.net, weight_decay=0.0, clip=1.0)
        losses = []
        with Prefetch(Packer(shards, GEOMETRY, 0), 0, torch.device(device)) as batches:
            for _ in range(10):
                batch, _alive = batches.take()
                loss = made.loss(batch)
                loss.backward()
                optimizer.step(1e-3)
                losses.append(float(loss.detach()))
            found = made.matches(batch)
        assert found.shape == (4, 24)
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=0.05)
    assert curves[1][-1] < curves[1][0]
