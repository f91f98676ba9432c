"""Accept length on held-out answers: what the engine would reach, from one pass over the answers.

A greedy answer says what the target will say, so how many drafts would be accepted can be read off for
every anchor at once; following the anchors that serving would have visited then gives the same number as
running it, bonus included and weighted by tokens, at a hundredth of the cost. That draws the curve; the
engine itself has the last word (`engine_accept`).

Letters: S rows, C tokens of a row, N anchors of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.train.packing import Batch, Geometry, Layout, lay_out, pack

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.train.shards import Shards

Ints = NDArray[np.int64]


class Matcher(Protocol):
    """What is measured."""

    def matches(self, batch: Batch) -> Tensor:
        """[S, N] leading drafts of each block that are what the text goes on with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Accept length of a set of answers."""

    length: float  # tokens per verify, bonus included
    num_tokens: int
    by_group: dict[str, float]


def held_out_docs(shards: Shards) -> Ints:
    """Indices of the held-out greedy answers, one for each prompt, in their order."""
    docs = shards.docs
    seen: set[bytes] = set()
    found = []
    for index in np.flatnonzero(docs["held_out"] & (docs["temperature"] == 0)).tolist():
        prompt = shards.tokens(index)[: docs["prompt"][index]].tobytes()
        if prompt not in seen:
            seen.add(prompt)
            found.append(index)
    return np.array(found, dtype=np.int64)


class HeldOut:
    """Held-out greedy answers, packed once and measured again and again.

    Args:
        shards: sequences; those that are held out are taken, in their order.
        geometry: shapes of a step.
        most: answers to take.
        device: of the target.

    Raises:
        ConfigError: there is no held-out answer.
    """

    def __init__(self, shards: Shards, geometry: Geometry, most: int, device: torch.device) -> None:
        docs = shards.docs
        length = np.minimum(docs["length"], geometry.row_tokens)
        ids = held_out_docs(shards)
        ids = ids[(length - docs["prompt"])[ids] >= 2][:most]
        if not len(ids):
            msg = (
                f"none of {len(docs)} answers is held out, so nothing can be measured; generate "
                "more answers, or raise --held-out before a run's first call"
            )
            raise ConfigError(msg)
        self._geometry, self._device = geometry, device
        rows = pack(length[ids].tolist(), geometry.row_tokens)
        self._layout = lay_out(shards, [[int(ids[i]) for i in row] for row in rows], geometry)
        self._answers: list[tuple[int, int, int, str]] = []  # row, first place, last place, group
        for s, row in enumerate(rows):
            start = 0
            for i in row:
                record = docs[ids[i]]
                first, end = start + int(record["prompt"]), start + int(length[ids[i]])
                self._answers.append((s, first, end - 1, record["group"].decode()))
                start = end

    @property
    def num_answers(self) -> int:
        """Answers that are measured."""
        return len(self._answers)

    def measure(self, task: Matcher) -> Accept:
        """Accept length of `task` on all answers."""
        found = np.zeros(self._layout.token_ids.shape, dtype=np.int64)
        for rows, anchors, alive in self._parts():
            layout = Layout(
                **{f: getattr(self._layout, f)[rows] for f in Layout.__dataclass_fields__}
            )
            batch = layout.batch(anchors, alive, self._geometry.targets).to(self._device)
            matched = task.matches(batch).cpu().numpy()
            owner = np.broadcast_to(rows[:, None], anchors.shape)
            found[owner[alive], anchors[alive]] = matched[alive]
        tokens: dict[str, int] = {}
        steps: dict[str, int] = {}
        for s, first, last, group in self._answers:
            tokens[group] = tokens.get(group, 0) + last - first
            steps[group] = steps.get(group, 0) + walk(found[s, first:last])
        return Accept(
            length=sum(tokens.values()) / sum(steps.values()),
            num_tokens=sum(tokens.values()),
            by_group={group: tokens[group] / steps[group] for group in sorted(tokens)},
        )

    def _parts(self) -> Iterator[tuple[Ints, Ints, NDArray[np.bool_]]]:
        """All anchors in batches of S rows and N anchors: rows [S], places and alive [S, N]."""
        num = self._geometry.anchors
        parts: list[tuple[int, Ints]] = []
        for s, may in enumerate(self._layout.may_anchor):
            places = np.flatnonzero(may)
            parts += [(s, places[i : i + num]) for i in range(0, len(places), num)]
        size = self._geometry.rows
        for start in range(0, len(parts), size):
            part = parts[start : start + size]
            rows = np.zeros(size, dtype=np.int64)
            anchors = np.zeros((size, num), dtype=np.int64)
            alive = np.zeros((size, num), dtype=np.bool_)
            for i, (s, places) in enumerate(part):
                rows[i] = s
                anchors[i, : len(places)] = places
                alive[i, : len(places)] = True
            yield rows, anchors, alive


def walk(matched: Ints) -> int:
    """Verify passes that an answer takes.

    Args:
        matched: [n] for each answer token but the last, how many drafts after it are right. Drafts
            past the answer's end are never right.
    """
    at = steps = 0
    while at < len(matched):
        at += int(matched[at]) + 1
        steps += 1
    return steps


def engine_accept(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> float:
    """Accept length in the engine: greedy, bonus included, weighted by tokens.

    Args:
        engine: with the drafter.
        prompts: token ids.
        max_new_tokens: longest answer.
        stop_ids: what ends an answer.
    """
    params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
    for i, ids in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_ids=ids, params=params, stop_ids=stop_ids))
    steps = accepted = 0
    while engine.has_work:
        for out in engine.step():
            if out.stats is None:
                continue
            if out.finish_reason is FinishReason.ERROR:
                msg = f"the engine failed on a held-out prompt: {out.error}"
                raise ConfigError(msg)
            steps += out.stats.num_steps
            accepted += out.stats.num_accepted
    return 1.0 + accepted / steps if steps else 1.0
