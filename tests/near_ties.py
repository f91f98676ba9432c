"""Answers with and without a drafter in 16 bits: where they part, and how near a tie was there; no tests here.

`MARGIN` is what is claimed. `PACELINE_NEAR_TIES` may name a file to which rates are written, one row a case.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import machine, source, versions
from paceline.core.request import SamplingParams
from paceline.draft import NETWORKS
from paceline.engine.engine import Engine
from tests import network_cases, tiny, tiny_drafters
from tests.engine.harness import Outcome, engine, request, run

# Nats. Logits here have a standard deviation of about 3; a product over 256 numbers in bfloat16 errs by
# some 0.4 % of it, and a step has a dozen in a row.
MARGIN = 0.15
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1999,
}
RECORD = "PACELINE_NEAR_TIES"
SCHEMA = "paceline-near-ties/1"
HOSTS: list[tuple[str, Mapping[str, Any]]] = [("ngram", {}), ("suffix", {})]
CASES = [*HOSTS, *network_cases.network_cases()]
_TEXTS = 24  # answers that networks are trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How a drafter's answers compare with plain decoding's."""

    answers: int
    gaps: list[float]  # nats between the two best tokens where an answer first differs, ascending
    accepted: int  # draft tokens, of all answers

    @property
    def largest(self) -> float:
        """Nats; 0 where no answer differs."""
        return max(self.gaps, default=0.0)


class Comparison:
    """Plain answers of a small random model on a device, and the same requests with drafters.

    Args:
        folder: where checkpoints are written.
        device: "cuda", or "cpu" to try this out.
        count: requests.
        steps: of training a network on some of the answers.
    """

    def __init__(
        self, folder: Path, device: str, *, count: int = 96, max_tokens: int = 64, steps: int = 120
    ) -> None:
        self._folder, self._steps = folder, steps
        self._own = {"device": device, "dtype": "bfloat16", "max_rows": 16}
        self._base = tiny.write_tiny(folder / "target", "qwen3", seed=3, **SHAPE)
        self._prompts = [[i % 1900 + 3, 5, 7 + i % 5] * (1 + i % 9) for i in range(count)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, logprobs=2)
        self._jobs = [request(str(i), p, params) for i, p in enumerate(self._prompts)]
        self._networks: dict[object, Path] = {}
        self.plain = run(engine(self._base, Engine.build, method="none", **self._own), self._jobs)

    def rates(self, name: str, own: Mapping[str, Any]) -> Rates:
        """Answer everything with a drafter.

        Args:
            name: its method.
            own: its engine options.
        """
        draft: dict[str, Any] = {"method": name, **own}
        if any(part in NETWORKS for part in own.get("parts", [name])):
            draft["model"] = str(self._network(network_cases.network_in(name, own)))
        eng = engine(self._base, Engine.build, **self._own, **draft)
        done = run(eng, self._jobs)
        accepted = int(eng.report()["spec_decode_num_accepted_tokens"])
        return Rates(answers=len(self.plain), gaps=gaps_of(self.plain, done), accepted=accepted)

    def anywhere(self) -> float:
        """Nats between the two best tokens at a token of plain decoding, in the median."""
        found = (gap(out, i) for out in self.plain.values() for i in range(len(out.tokens)))
        return statistics.median(found)

    def _network(self, name: str) -> Path:
        """A network that half knows the first answers; drafters with the same weights share it."""
        build = tiny_drafters.BUILDERS[name]
        if build not in self._networks:
            texts = [p + self.plain[str(i)].tokens for i, p in enumerate(self._prompts[:_TEXTS])]
            folder = self._folder / f"drafter-{name}"
            self._networks[build] = build(folder, self._base, texts, steps=self._steps)
        return self._networks[build]


def gap(outcome: Outcome, index: int) -> float:
    """Between the two best tokens where output token `index` was chosen, in nats."""
    found = [item for out in outcome.outputs for item in out.logprobs or ()]
    best, second = found[index].top_logprobs[:2]
    return best - second


def gaps_of(plain: Mapping[str, Outcome], drafted: Mapping[str, Outcome]) -> list[float]:
    """`gap` of plain decoding at the first token that differs, of every answer that has one."""
    found = []
    for name, outcome in plain.items():
        pairs = zip(outcome.tokens, drafted[name].tokens, strict=True)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if first is not None:
            found.append(gap(outcome, first))
    return sorted(found)


def write_down(case: str, rates: Rates, anywhere: float, device: torch.device) -> None:
    """Put a case's row into the record that `PACELINE_NEAR_TIES` names, if it names one.

    Rows of other cases stay if they are of the same source and versions.
    """
    name = os.environ.get(RECORD)
    if not name:
        return
    path, made_of = Path(name), {"source": source(), "versions": versions()}
    rows: Sequence[Mapping[str, Any]] = ()
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if all(kept.get(key) == value for key, value in made_of.items()):
            rows = [row for row in kept["rows"] if row["case"] != case]
    row = {
        "case": case,
        "answers": rates.answers,
        "differing": len(rates.gaps),
        "largest_gap_nats": round(rates.largest, 4),
        "median_gap_nats": round(statistics.median(rates.gaps), 4) if rates.gaps else None,
        "median_gap_anywhere_nats": round(anywhere, 4),
        "accepted_tokens": rates.accepted,
    }
    record = {
        "schema": SCHEMA,
        "what": "greedy answers in bfloat16, with a drafter and without: how many differ, and nats between "
        "the two best tokens where each first does",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        **made_of,
        "margin_nats": MARGIN,
        "rows": sorted([*rows, row], key=lambda r: str(r["case"])),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
