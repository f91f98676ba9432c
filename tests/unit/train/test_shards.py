"""Shards: what was flushed is there, whatever kills the writer; another model's data is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.train import shards as module
from paceline.train.shards import Doc, Shards, ShardWriter
from tests.unit.train.making import random_docs, write_docs


def same(shards: Shards, docs: list[Doc]) -> None:
    """The folder holds exactly these."""
    assert len(shards) == len(docs)
    for i, doc in enumerate(docs):
        assert shards.tokens(i).tolist() == doc.token_ids
        record = shards.docs[i]
        assert (record["prompt"], record["job"]) == (doc.num_prompt, doc.job)
        assert (record["held_out"], record["group"].decode()) == (doc.held_out, doc.group)


def test_sequences_come_back(tmp_path: Path) -> None:
    """Over several shards, in the order in which they were added."""
    docs = random_docs(40)
    found = write_docs(tmp_path / "a", docs, shard_tokens=300)
    assert len(list((tmp_path / "a").glob("tokens-*"))) > 3
    same(found, docs)
    assert found.num_answer_tokens == sum(len(d.token_ids) - d.num_prompt for d in docs)


@pytest.mark.parametrize("first", [1, 7, 20])
def test_a_second_writer_goes_on(tmp_path: Path, first: int) -> None:
    """A later call appends to the open shard."""
    docs = random_docs(40)
    write_docs(tmp_path, docs[:first], shard_tokens=300)
    same(write_docs(tmp_path, docs[first:], shard_tokens=300), docs)


def test_a_killed_writer_loses_what_it_had_not_flushed(tmp_path: Path) -> None:
    """Killed between the two files of a flush: the old records still fit the new tokens."""
    docs = random_docs(12)
    writer = ShardWriter(tmp_path, 97, {"model": "tiny"})
    for doc in docs[:5]:
        writer.add(doc)
    writer.flush()
    old = (tmp_path / "docs-00000.npy").read_bytes()
    for doc in docs[5:]:
        writer.add(doc)
    writer.flush()
    (tmp_path / "docs-00000.npy").write_bytes(old)
    same(Shards(tmp_path), docs[:5])
    same(write_docs(tmp_path, docs[5:]), docs)


def test_a_full_disk_leaves_the_last_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes through, and the folder is as it was."""
    docs = random_docs(12)
    writer = ShardWriter(tmp_path, 97, {"model": "tiny"})
    for doc in docs[:5]:
        writer.add(doc)
    writer.flush()
    writer.add(docs[5])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "save", full)
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    monkeypatch.undo()
    same(Shards(tmp_path), docs[:5])
    assert not list(tmp_path.glob(".*partial"))


def test_another_models_folder_is_refused(tmp_path: Path) -> None:
    """Tokens of two models never mix."""
    write_docs(tmp_path, random_docs(3))
    with pytest.raises(ConfigError, match="one folder holds one model's"):
        ShardWriter(tmp_path, 97, {"model": "other"})


def test_wide_vocabularies(tmp_path: Path) -> None:
    """Ids above 16 bits survive."""
    writer = ShardWriter(tmp_path, 150_000, {})
    writer.add(Doc(token_ids=[149_999, 3], num_prompt=1))
    writer.flush()
    assert Shards(tmp_path).tokens(0).tolist() == [149_999, 3]


@pytest.mark.parametrize("damage", ["cut", "mixed"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    """A cut file, or records of other tokens: the message names the file."""
    write_docs(tmp_path, random_docs(9))
    path = tmp_path / "tokens-00000.npy"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:40])
    else:
        np.save(path, np.zeros(4, dtype=np.uint16))
    with pytest.raises(ConfigError, match=r"00000\.npy is damaged"):
        Shards(tmp_path)
