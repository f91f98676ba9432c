"""What `widened_speed.py` is made of: drafters as they are asked for, the time there is, and the record."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from paceline.api.tokenizer import Tokenizer
from paceline.bench.run import Settings, Slice, Task
from paceline.bench.summary import common_length
from paceline.core.errors import MemoryBudgetError
from paceline.draft.dflash_config import FIRST, SECOND

RECORDED = Path(__file__).parent / "results" / "accept-smollm2.json"
Row: TypeAlias = dict[str, object]


class TimeIsUpError(Exception):
    """What was running does not fit any more."""


@dataclass(slots=True)
class Clock:
    """When all of it, and a part of it, has to end."""

    seconds: float
    part: float
    began: float = field(default_factory=time.perf_counter)
    part_began: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.began

    def check(self) -> None:
        """Raise if a part, or all, has taken too long."""
        if self.spent > self.seconds or time.perf_counter() - self.part_began > self.part:
            raise TimeIsUpError


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A drafter: vLLM's keys."""

    config: Mapping[str, object]

    @property
    def name(self) -> str:
        """Of the registry."""
        return str(self.config["method"])

    @property
    def nodes(self) -> int:
        """Draft nodes of a step."""
        return int(str(self.config.get("num_speculative_tokens", 0)))

    @property
    def facts(self) -> Row:
        """What a row says of it, and no other drafter's row."""
        return {
            "drafter": self.name,
            "parts": self.config.get("parts"),
            "nodes": self.nodes,
            "settings": {k: v for k, v in self.config.items() if k.startswith("eagle_")},
        }

    def network(self, folders: Mapping[str, Path]) -> Path | None:
        """The folder of its network among those of DFlash and EAGLE-3; None: it has none."""
        parts = self.config.get("parts")
        names = {self.name, *(map(str, parts) if isinstance(parts, list) else ())}
        if names & {"dflash", "ddtree"}:
            return folders.get("dflash")
        return folders.get("eagle3") if "eagle3" in names else None


@dataclass(slots=True, kw_only=True)
class Session:
    """What all parts share."""

    args: argparse.Namespace
    clock: Clock
    tasks: Sequence[Task]
    tokens: Tokenizer
    header: Row
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    doing: str = ""

    @property
    def settings(self) -> Settings:
        """Of a run; how many at a time is to be said."""
        return Settings(max_tokens=self.args.max_tokens, temperature=0.0)

    def chosen(self, sequences: int) -> Sequence[Task]:
        """The prompts that so many sequences answer."""
        if sequences == max(self.args.sequences):
            return self.tasks
        return self.tasks[: max(self.args.least, self.args.rounds * sequences)]

    def record(self) -> Row:
        """What there is so far."""
        end = {"seconds": round(self.clock.spent, 1), "left_out": self.left_out}
        return {**self.header, **end, "rows": self.rows}

    def keep(self) -> None:
        """Write what there is so far; a file is whole at every time."""
        if self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.args.out.with_suffix(".part")
            fresh.write_text(json.dumps(self.record(), indent=1, allow_nan=False) + "\n")
            fresh.replace(self.args.out)

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"{self.clock.spent:6.1f} s  {text}", file=sys.stderr, flush=True)

    def begin(self, name: str) -> None:
        """A part begins.

        Raises:
            TimeIsUpError: there is no time for it.
        """
        self.doing = name
        self.clock.part_began = time.perf_counter()
        self.clock.check()

    @contextmanager
    def part(self) -> Iterator[None]:
        """What is left out from where there is no time for it, or no memory; begins in the block."""
        try:
            yield
        except TimeIsUpError:
            self.left_out.append(f"{self.doing}: no time")
        except (torch.OutOfMemoryError, MemoryBudgetError) as error:
            self.left_out.append(f"{self.doing}: no memory ({str(error)[:80]})")
        self.keep()


def recorded(way: Way, prompts: int, max_tokens: int, device: str) -> float | None:
    """The small model's accept length in the record of its own; None: it has no such row."""
    if not RECORDED.exists():
        return None
    for row in json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]:
        wanted = {
            **way.facts,
            "dataset": "human_eval",
            "group": "humaneval",
            "temperature": 0.0,
            "device": torch.device(device).type,
            "max_tokens": max_tokens,
            "adaptive": False,
            "prompts": prompts,
        }
        given = {"settings": {}, **row}
        if all(given.get(k) == v for k, v in wanted.items()):
            return float(row["accept_length"])
    return None


def differences(wide: Slice, small: Slice) -> Row:
    """Where answers part from the small model's, and how clear its choice was there."""
    own = {s.task: s for s in small.samples}
    margins, equal = [], 0
    for sample in wide.samples:
        plain = own[sample.task]
        place = common_length(plain.token_ids, sample.token_ids)
        if place == min(len(plain.token_ids), len(sample.token_ids)):
            equal += len(plain.token_ids) == len(sample.token_ids)
            continue
        best, second = plain.logprobs[place].top_logprobs[:2]
        margins.append(best - second)
    every = [p.top_logprobs[0] - p.top_logprobs[1] for s in small.samples for p in s.logprobs]
    return {
        "equal": equal,
        "parted": len(margins),
        "largest_margin_nats": round(max(margins), 4) if margins else None,
        "median_margin_nats": round(statistics.median(margins), 4) if margins else None,
        "median_margin_anywhere_nats": round(statistics.median(every), 3),
    }


def networks_of(folders: Iterable[Path]) -> dict[str, Path]:
    """Which of these folders hold DFlash's and EAGLE-3's networks."""
    found = {}
    for folder in sorted(folders):
        config = folder / "config.json"
        if config.is_file():
            names = json.loads(config.read_text(encoding="utf-8"))["architectures"]
            found["dflash" if {FIRST, SECOND} & set(names) else "eagle3"] = folder
    return found
