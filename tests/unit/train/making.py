"""Drafters in training and token sequences, as tests of training have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paceline.draft.dflash_net import DFlashNet
from paceline.draft.eagle3_net import Eagle3Net
from paceline.models import LoadedModel
from paceline.train import eagle3
from paceline.train.dflash import DFlashTask, initialise, new_config
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.eagle3 import Eagle3Task
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.losses import RowWeights
from paceline.train.shards import Doc, Shards, ShardWriter
from paceline.train.target import target_info

MASK = 90  # ">" is rare in what the tests say
BLOCK = 5
CHAIN = 4
DRAFTED = (*range(2, 50), *range(60, 90, 3))  # tokens that the tests' EAGLE-3 drafters know
DECAY = RowWeights(gamma=4.0, dpace=False, alpha=0.5)


def new_net(target: LoadedModel, *, seed: int = 1, layers: int = 2) -> DFlashNet:
    """A drafter of three taps and blocks of `BLOCK`, in the target's dtype."""
    settings = DFlashSettings(layers=layers, block=BLOCK, taps=(0, 2, 1), mlp_size=80)
    made = DFlashNet(new_config(settings, target.config, MASK), target_info(target.net))
    initialise(made, seed)
    return made


def new_task(target: LoadedModel, **options: int) -> DFlashTask:
    """A drafter in training."""
    return DFlashTask(target.net, new_net(target, **options), DECAY)


def new_eagle3(
    target: LoadedModel, *, seed: int = 1, vocabulary: Sequence[int] = DRAFTED, **flags: bool
) -> Eagle3Net:
    """A drafter of some of the target's tokens, in its dtype; `flags` as in its configuration."""
    settings = Eagle3Settings(
        taps=(0, 1, 2), draft_vocab=len(vocabulary), mlp_size=80, form="eagle3"
    )
    config = replace(eagle3.new_config(settings, target.config), **flags)
    made = Eagle3Net(config, target_info(target.net))
    made.set_vocabulary(torch.tensor(sorted(vocabulary)))
    eagle3.initialise(made, target.net, seed)
    return made


def new_eagle3_task(target: LoadedModel, net: Eagle3Net | None = None) -> Eagle3Task:
    """The same, or `net`, in training."""
    return Eagle3Task(target.net, new_eagle3(target) if net is None else net, CHAIN, DECAY)


def write_docs(folder: Path, docs: Sequence[Doc], shard_tokens: int = 1000) -> Shards:
    """Sequences on disk."""
    writer = ShardWriter(folder, 97, {"model": "tiny"}, shard_tokens)
    for doc in docs:
        writer.add(doc)
    writer.flush()
    return Shards(folder)


def random_docs(count: int, seed: int = 0, *, held_out_every: int = 5) -> list[Doc]:
    """Random tokens in sequences of 6 to 60; every so many is held out."""
    rng = np.random.default_rng(seed)
    docs = []
    for i in range(count):
        length = int(rng.integers(6, 61))
        docs.append(
            Doc(
                token_ids=rng.integers(3, 90, length).tolist(),
                num_prompt=int(rng.integers(1, length - 2)),
                held_out=i % held_out_every == 0,
                job=i,
                group="ab"[i % 2],
            )
        )
    return docs
