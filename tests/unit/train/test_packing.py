"""Packed rows: every sequence once an epoch, anchors where a block may be drafted, the same every time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from paceline.core.errors import ConfigError
from paceline.train.packing import Batch, Geometry, Packer, pack, usual_anchors
from paceline.train.shards import Doc, Shards
from tests.unit.train.making import random_docs, write_docs

GEOMETRY = Geometry(rows=3, row_tokens=48, anchors=6, targets=4)


def docs_of(batch: Batch) -> list[tuple[int, ...]]:
    """The token sequences of a batch's rows."""
    found = []
    for tokens, owners in zip(batch.token_ids, batch.docs, strict=True):
        found += [tuple(tokens[owners == d].tolist()) for d in owners[owners >= 0].unique()]
    return found


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Sixty sequences over several files; some are longer than a row."""
    return write_docs(tmp_path / "docs", random_docs(60), shard_tokens=300)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80))
def test_pack_keeps_every_sequence_within_its_room(lengths: list[int]) -> None:
    """Each index once, no row overfull."""
    rows = pack(lengths, 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)


def test_an_epoch_trains_every_sequence_once_and_no_held_out_one(shards: Shards) -> None:
    """What is held out never enters a batch; all else does, once, cut at the row's end."""
    packer = Packer(shards, GEOMETRY, seed=1)
    expected = Counter(
        tuple(shards.tokens(i)[:48].tolist())
        for i in range(len(shards))
        if not shards.docs["held_out"][i]
        and min(shards.docs["length"][i], 48) - shards.docs["prompt"][i] >= 2
    )
    found = Counter[tuple[int, ...]]()
    step = 0
    while found.total() < expected.total():
        found += Counter(docs_of(packer.batch(step)))
        step += 1
    assert packer.num_docs == expected.total()
    assert not expected - found
    assert found.total() - expected.total() < 12, "the next epoch began early"


def test_anchors_and_targets(shards: Shards) -> None:
    """An anchor is an answer token with a successor; targets are what follows in its sequence."""
    packer = Packer(shards, GEOMETRY, seed=1)
    prompts = {
        tuple(shards.tokens(i)[:48].tolist()): int(shards.docs["prompt"][i])
        for i in range(len(shards))
    }
    for step in range(8):
        batch = packer.batch(step)
        for s in range(3):
            alive = batch.anchors[s][batch.alive[s]].tolist()
            assert len(set(alive)) == len(alive), "anchors differ"
            for n, place in enumerate(batch.anchors[s].tolist()):
                if not batch.alive[s, n]:
                    assert (batch.targets[s, n] == -1).all()
                    continue
                own = batch.docs[s] == batch.docs[s, place]
                text = batch.token_ids[s][own].tolist()
                at = int(batch.positions[s, place])
                assert text[at] == batch.token_ids[s, place]
                assert at >= prompts[tuple(text)]
                follow = text[at + 1 : at + 5]
                assert follow
                assert batch.targets[s, n].tolist() == follow + [-1] * (4 - len(follow))


def test_batches_depend_on_seed_and_step_alone(shards: Shards) -> None:
    """A resumed run sees the batches of the first one, over the end of an epoch too."""
    first = Packer(shards, GEOMETRY, seed=1)
    batches = [first.batch(step) for step in range(40)]
    again = Packer(shards, GEOMETRY, seed=1)
    for step in (37, 3, 38):
        for name in Batch.__dataclass_fields__:
            assert torch.equal(getattr(again.batch(step), name), getattr(batches[step], name))
    other = Packer(shards, GEOMETRY, seed=2)
    assert not torch.equal(other.batch(0).token_ids, batches[0].token_ids)


def test_more_anchors_than_places(shards: Shards) -> None:
    """A row with fewer answer tokens than anchors has all of them, and dead ones."""
    wide = Geometry(rows=2, row_tokens=48, anchors=60, targets=4)
    batch = Packer(shards, wide, seed=1).batch(0)
    assert batch.anchors.shape == (2, 60)
    assert 0 < int(batch.alive.sum()) < 2 * 48


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    """Prompts that fill the row leave no answer: the message has the figures."""
    docs = [Doc(token_ids=list(range(60)), num_prompt=50)]
    with pytest.raises(ConfigError, match="nothing to train on: there are 1 answers"):
        Packer(write_docs(tmp_path / "docs", docs), GEOMETRY, seed=0)
    empty = write_docs(tmp_path / "none", [])
    assert len(empty) == 0
    assert np.array_equal(empty.docs["start"], [])
    with pytest.raises(ConfigError, match="there are 0 answers"):
        Packer(empty, GEOMETRY, seed=0)


def test_the_usual_number_of_anchors_is_enough_for_nearly_all(
    tmp_path: Path, shards: Shards
) -> None:
    """Most rows have room for all their anchors, and little of it is idle; never beyond a row."""
    count = usual_anchors(shards, 256)
    packer = Packer(shards, Geometry(rows=1, row_tokens=256, anchors=256, targets=1), seed=1)
    found = [int(packer.batch(step).alive.sum()) for step in range(packer.steps_per_epoch)]
    kept = sum(min(n, count) for n in found) / sum(found)
    assert kept > 0.9
    assert count % 16 == 0
    assert count <= 1.1 * sum(found) / len(found) + 32
    only = [Doc(token_ids=[5] * 60, num_prompt=1)]
    assert usual_anchors(write_docs(tmp_path / "only", only), 60) == 60
