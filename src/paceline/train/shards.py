"""Token sequences on disk: packed, in shards, appended while they are made, read without loading them.

A shard is two files: `tokens-00000.npy`, all sequences one after the other, and `docs-00000.npy`, one
record per sequence (`DOC`). The open shard is written again, atomically, at every flush, tokens first,
so a killed writer loses what came after its last flush and nothing else. `about.json` says whose tokens
they are, so that two models' data cannot be mixed.

Letters: T tokens of a shard, n sequences.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError
from paceline.models.atomic import replacing

# start and length: tokens in the shard's file; prompt: how many of them are not the target's own.
DOC: Final = np.dtype(
    [
        ("start", "<i8"),
        ("length", "<i4"),
        ("prompt", "<i4"),
        ("temperature", "<f4"),
        ("held_out", "?"),
        ("job", "<i8"),
        ("group", "S24"),
    ]
)
SHARD_TOKENS = 7_000_000  # 14 MB in 16 bits
_SMALL = 1 << 16  # vocabularies up to this size are kept in 16 bits
_ABOUT = "about.json"

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doc:
    """A token sequence on its way to a shard: a prompt and the target's answer."""

    token_ids: list[int]
    num_prompt: int
    temperature: float = 0.0
    held_out: bool = False
    job: int = -1
    group: str = ""


class ShardWriter:
    """Appends sequences to a folder of shards.

    Args:
        folder: made if it is missing; sequences that it holds are kept.
        vocab_size: of the model; decides how wide a token is stored.
        about: facts that must be the same for all sequences of the folder.
        shard_tokens: tokens after which a new shard begins.

    Raises:
        ConfigError: the folder's sequences are another model's.
        OSError: the folder can't be made or read.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        about: Mapping[str, object],
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder, {"vocab_size": vocab_size, **about})
        self.folder = folder
        self._dtype = np.dtype("<u2" if vocab_size <= _SMALL else "<i4")
        self._limit = shard_tokens
        self._docs: list[NDArray[np.void]] = []
        self._tokens: list[NDArray[np.integer]] = []
        self._size = 0
        self._dirty = False
        self._index = _count(folder)
        if self._index:  # go on with the last shard if it has room
            tokens = np.load(folder / _name("tokens", self._index - 1))
            if len(tokens) < shard_tokens:
                self._index -= 1
                self._tokens, self._size = [tokens], len(tokens)
                self._docs = [np.load(folder / _name("docs", self._index))]

    def add(self, doc: Doc) -> None:
        """Append one sequence; on disk after the next `flush`, or when its shard is full."""
        record = np.zeros(1, dtype=DOC)
        record[0] = (
            self._size,
            len(doc.token_ids),
            doc.num_prompt,
            doc.temperature,
            doc.held_out,
            doc.job,
            doc.group.encode(errors="replace")[:24],
        )
        self._docs.append(record)
        self._tokens.append(np.array(doc.token_ids, dtype=self._dtype))
        self._size += len(doc.token_ids)
        self._dirty = True
        if self._size >= self._limit:
            self.flush()
            self._index += 1
            self._docs, self._tokens, self._size = [], [], 0

    def flush(self) -> None:
        """Write the open shard.

        Raises:
            OSError: the disk is full or read-only; what was flushed before is still there.
        """
        if not self._dirty:
            return
        self._tokens, self._docs = [np.concatenate(self._tokens)], [np.concatenate(self._docs)]
        # Tokens first: a record never points at tokens that are not there.
        for kind, array in (("tokens", self._tokens[0]), ("docs", self._docs[0])):
            with replacing(self.folder / _name(kind, self._index)) as file:
                np.save(file, array)
        self._dirty = False


class Shards:
    """All sequences of some folders, one folder after the other, mapped from disk.

    Args:
        folders: of a `ShardWriter` each.

    Attributes:
        docs: [n] records of `DOC`, all shards one after the other.

    Raises:
        ConfigError: a shard is damaged.
    """

    def __init__(self, *folders: Path) -> None:
        self._tokens: list[NDArray[np.integer]] = []
        docs: list[NDArray[np.void]] = []
        self._firsts: list[int] = []
        for folder, index in ((f, i) for f in folders for i in range(_count(f))):
            path = folder / _name("docs", index)
            try:
                found = np.load(path)
                path = folder / _name("tokens", index)
                tokens = np.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise _damaged(path, str(error)) from error
            if found.dtype != DOC or (found["start"] + found["length"] > len(tokens)).any():
                raise _damaged(path, "its records do not fit its tokens")
            self._firsts.append(sum(len(d) for d in docs))
            docs.append(found)
            self._tokens.append(tokens)
        self.docs: NDArray[np.void] = np.concatenate(docs) if docs else np.zeros(0, dtype=DOC)

    def __len__(self) -> int:
        return len(self.docs)

    def tokens(self, index: int) -> Tokens:
        """Token ids of one sequence, [length] int64, in memory of their own."""
        shard = bisect.bisect_right(self._firsts, index) - 1
        start, length = int(self.docs["start"][index]), int(self.docs["length"][index])
        return self._tokens[shard][start : start + length].astype(np.int64)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target made."""
        return int((self.docs["length"] - self.docs["prompt"]).sum())


def _name(kind: str, index: int) -> str:
    return f"{kind}-{index:05d}.npy"


def _count(folder: Path) -> int:
    """Whole shards, counted from the first; a shard is there once its records are."""
    index = 0
    while (folder / _name("docs", index)).is_file():
        index += 1
    return index


def _claim(folder: Path, about: Mapping[str, object]) -> None:
    """Write down whose sequences these are, or check that they are the same one's."""
    path = folder / _ABOUT
    if path.is_file():
        check_about(folder, about)
        return
    with replacing(path) as file:
        file.write(json.dumps(dict(about), indent=1).encode())


def check_about(folder: Path, about: Mapping[str, object]) -> None:
    """Refuse a folder whose sequences were made with other facts than these.

    Raises:
        ConfigError: as above, or it does not say.
    """
    path = folder / _ABOUT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if found != dict(about):
        msg = (
            f"{folder} holds sequences made with {found}, and this run has {dict(about)}; one "
            "folder holds one model's. Use another folder, or delete this one."
        )
        raise ConfigError(msg)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({why}); shards as this program writes them are needed. Delete both "
        "files of this shard and of all later ones, and generate again."
    )
