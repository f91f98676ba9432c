"""Drafters in training and token sequences, as tests of training have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.draft.dflash_net import DFlashNet
from paceline.models import LoadedModel
from paceline.train.dflash import DFlashTask, initialise, new_config, target_info
from paceline.train.losses import RowWeights
from paceline.train.settings import TrainSettings
from paceline.train.shards import Doc, Shards, ShardWriter

MASK = 90  # ">" is rare in what the tests say
BLOCK = 5
DECAY = RowWeights(gamma=4.0, dpace=False, alpha=0.5)


def new_net(target: LoadedModel, *, seed: int = 1, layers: int = 2) -> DFlashNet:
    """A drafter of three taps and blocks of `BLOCK`, in the target's dtype."""
    settings = TrainSettings(layers=layers, block=BLOCK, taps=(0, 2, 1), mlp_size=80)
    made = DFlashNet(new_config(settings, target.config, MASK), target_info(target.net))
    initialise(made, seed)
    return made


def new_task(target: LoadedModel, **options: int) -> DFlashTask:
    """A drafter in training."""
    return DFlashTask(target.net, new_net(target, **options), DECAY)


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
