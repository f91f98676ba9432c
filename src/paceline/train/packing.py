"""Packed rows and random anchors: what a training step sees, a pure function of (seed, step).

Sequences of different lengths are put one after the other into rows of C tokens, so that every step has
the same shapes and hardly any padding. An anchor is an answer token with at least one token after it;
from there a block is drafted. Nothing is kept between steps, so a resumed run sees what the first one
would have seen.

Worked example, C = 12, two sequences (prompt p, answer a), block 4, anchors at places 3 and 8:

    place     0  1  2  3  4  5 | 6  7  8  9 |10 11
    token     p  p  a  a  a  a | p  p  a  a | .  .
    sequence  0  0  0  0  0  0 | 1  1  1  1 |-1 -1
    position  0  1  2  3  4  5 | 0  1  2  3 | 0  0
    targets of the anchor at 3: places 4, 5, none; at 8: place 9, none, none

Letters: S rows, C tokens of a row, N anchors of a row, R tokens that follow an anchor and are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.train.shards import Shards

_OPEN_ROWS = 16  # rows that are filled at the same time: more of them waste fewer places
_ANCHOR_UNIT = 16  # numbers of anchors that products like
_PLAN, _ANCHORS = 0, 1  # uses of the seed, so that no two draw the same numbers

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """S packed rows with N anchors each. All tensors on one device."""

    token_ids: Tensor  # [S, C] int64; 0 where there is none
    docs: Tensor  # [S, C] int32 number of the sequence within its row; -1: none
    positions: Tensor  # [S, C] int64 within the sequence
    anchors: Tensor  # [S, N] int64 places
    alive: Tensor  # [S, N] bool; False: the row has fewer anchors than N
    targets: Tensor  # [S, N, R] int64 tokens after the anchor; -1: the sequence has ended

    def to(self, device: torch.device) -> Batch:
        """The same on another device; from pinned memory the copy runs beside other work."""
        return Batch(
            **{
                name: getattr(self, name).to(device, non_blocking=True)
                for name in Batch.__dataclass_fields__
            }
        )

    def pinned(self) -> Batch:
        """The same in memory that a GPU can copy from by itself."""
        return Batch(
            **{name: getattr(self, name).pin_memory() for name in Batch.__dataclass_fields__}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shapes of a step."""

    rows: int  # S
    row_tokens: int  # C
    anchors: int  # N
    targets: int  # R


def usual_anchors(shards: Shards, row_tokens: int) -> int:
    """How many anchors all but the fullest rows have: their mean number, and a tenth more.

    With so many, nearly every answer token is trained on, and few places for anchors are idle.

    Args:
        shards: sequences.
        row_tokens: C.
    """
    docs = shards.docs[~shards.docs["held_out"]]
    length = np.minimum(docs["length"], row_tokens)
    answered = int(np.maximum(length - docs["prompt"] - 1, 0).sum()) / max(int(length.sum()), 1)
    most = math.ceil(1.1 * answered * row_tokens / _ANCHOR_UNIT) * _ANCHOR_UNIT
    return min(max(most, 1), row_tokens)


class Packer:
    """Makes the batches of a run from shards.

    Args:
        shards: sequences.
        geometry: shapes.
        seed: of order and anchors.

    Raises:
        ConfigError: no sequence can be trained on.
    """

    def __init__(self, shards: Shards, geometry: Geometry, seed: int) -> None:
        self._shards = shards
        self._geometry = geometry
        self._seed = seed
        docs = shards.docs
        length = np.minimum(docs["length"], geometry.row_tokens)  # the end of a longer one is cut
        usable = ~docs["held_out"] & (length - docs["prompt"] >= 2)
        self._ids: Ints = np.flatnonzero(usable)
        self._lengths: Ints = length[self._ids].astype(np.int64)
        if not len(self._ids):
            msg = (
                f"nothing to train on: there are {len(docs)} answers, of which "
                f"{int(docs['held_out'].sum())} are held out and none has two answer tokens within "
                f"{geometry.row_tokens} tokens; generate more, or raise --row-tokens"
            )
            raise ConfigError(msg)
        self._epoch, self._first = -1, 0  # the planned epoch, and the number of its first row
        self._rows: list[list[int]] = []

    @property
    def num_docs(self) -> int:
        """Sequences that are trained on."""
        return len(self._ids)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every sequence was seen, the last one not counted unless it is whole."""
        self._row(0)
        return max(len(self._rows) // self._geometry.rows, 1)

    def batch(self, step: int) -> Batch:
        """The batch of a step, on the CPU."""
        size = self._geometry.rows
        rows = [self._row(step * size + i) for i in range(size)]
        rng = np.random.default_rng([self._seed, _ANCHORS, step])
        return assemble(self._shards, rows, self._geometry, rng)

    def _row(self, number: int) -> list[int]:
        """Row `number`, counted over all epochs. Epochs have different numbers of rows.

        Rows are asked for in order but for a resumed run's first, so counting from the start is
        cheap enough: an epoch's plan takes a fraction of a second.
        """
        if self._epoch < 0 or number < self._first:
            self._epoch, self._first, self._rows = 0, 0, self._plan(0)
        while number >= self._first + len(self._rows):
            self._first += len(self._rows)
            self._epoch += 1
            self._rows = self._plan(self._epoch)
        return self._rows[number - self._first]

    def _plan(self, epoch: int) -> list[list[int]]:
        """All sequences, in random order, packed into rows."""
        rng = np.random.default_rng([self._seed, _PLAN, epoch])
        order = rng.permutation(len(self._ids))
        rows = pack(self._lengths[order].tolist(), self._geometry.row_tokens)
        ids = self._ids[order].tolist()
        packed = [[ids[i] for i in row] for row in rows]
        return [packed[i] for i in rng.permutation(len(packed)).tolist()]


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """First fit into a few open rows; the fullest is closed where none has room.

    Args:
        lengths: of the sequences, none above `room`.
        room: C.

    Returns:
        Indices into `lengths`, by row.
    """
    done: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (places left, indices)
    for i, length in enumerate(lengths):
        for j, (left, row) in enumerate(open_rows):
            if length <= left:
                row.append(i)
                open_rows[j] = (left - length, row)
                break
        else:
            if len(open_rows) == _OPEN_ROWS:
                fullest = min(range(_OPEN_ROWS), key=lambda j: open_rows[j][0])
                done.append(open_rows.pop(fullest)[1])
            open_rows.append((room - length, [i]))
    return done + [row for _, row in open_rows]


def assemble(
    shards: Shards, rows: Sequence[Sequence[int]], geometry: Geometry, rng: np.random.Generator
) -> Batch:
    """Tensors of packed rows with random anchors.

    Args:
        shards: sequences.
        rows: S lists of indices into them.
        geometry: shapes.
        rng: draws the anchors.
    """
    layout = lay_out(shards, rows, geometry)
    keys = rng.random(layout.token_ids.shape)
    keys[~layout.may_anchor] = 2.0  # behind all that may
    count = min(geometry.anchors, keys.shape[1])
    chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
    chosen.sort(axis=1)
    alive = np.take_along_axis(keys, chosen, axis=1) < 1.5
    short = geometry.anchors - count
    anchors = np.pad(np.where(alive, chosen, 0), ((0, 0), (0, short)))
    return layout.batch(anchors, np.pad(alive, ((0, 0), (0, short))), geometry.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Packed rows before anchors are chosen; numpy arrays [S, C]."""

    token_ids: Ints
    docs: NDArray[np.int32]
    positions: Ints
    ends: Ints  # place after the last of the token's sequence
    may_anchor: NDArray[np.bool_]

    def batch(self, anchors: Ints, alive: NDArray[np.bool_], num_targets: int) -> Batch:
        """With chosen anchors: places [S, N], and which of them are real."""
        at = anchors[:, :, None] + 1 + np.arange(num_targets)
        last = np.take_along_axis(self.ends, anchors, axis=1)[:, :, None]
        flat = np.minimum(at, self.token_ids.shape[1] - 1).reshape(len(anchors), -1)
        tokens = np.take_along_axis(self.token_ids, flat, axis=1).reshape(at.shape)
        targets = np.where((at < last) & alive[:, :, None], tokens, -1)
        return Batch(
            token_ids=torch.from_numpy(self.token_ids),
            docs=torch.from_numpy(self.docs),
            positions=torch.from_numpy(self.positions),
            anchors=torch.from_numpy(anchors.astype(np.int64)),
            alive=torch.from_numpy(alive),
            targets=torch.from_numpy(targets),
        )


def lay_out(shards: Shards, rows: Sequence[Sequence[int]], geometry: Geometry) -> Layout:
    """Put sequences into rows. Arguments as for `assemble`."""
    shape = (len(rows), geometry.row_tokens)
    token_ids = np.zeros(shape, dtype=np.int64)
    docs = np.full(shape, -1, dtype=np.int32)
    positions = np.zeros(shape, dtype=np.int64)
    ends = np.zeros(shape, dtype=np.int64)
    may_anchor = np.zeros(shape, dtype=np.bool_)
    prompts = shards.docs["prompt"]
    for s, row in enumerate(rows):
        start = 0
        for number, index in enumerate(row):
            tokens = shards.tokens(index)[: geometry.row_tokens]
            end = start + len(tokens)
            token_ids[s, start:end] = tokens
            docs[s, start:end] = number
            positions[s, start:end] = np.arange(len(tokens))
            ends[s, start:end] = end
            may_anchor[s, start + int(prompts[index]) : end - 1] = True
            start = end
    return Layout(
        token_ids=token_ids, docs=docs, positions=positions, ends=ends, may_anchor=may_anchor
    )
