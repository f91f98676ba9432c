"""What `tests/gpu/test_near_ties.py` measures and writes down, where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.request import FinishReason, StepOutput, TokenLogprobs
from paceline.draft import COMPOSITES, DRAFTERS, NETWORKS
from tests import network_cases
from tests.engine.harness import Outcome
from tests.near_ties import (
    CASES,
    MARGIN,
    RECORD,
    SHAPE,
    Comparison,
    Rates,
    gaps_of,
    write_down,
)
from tests.records import text

CPU = torch.device("cpu")


def answer(tokens: list[int], gaps: list[float]) -> Outcome:
    """One whose two best tokens were so far apart, two tokens a step."""
    found = [
        TokenLogprobs(logprob=-0.1, top_ids=(t, 0), top_logprobs=(-0.1, -0.1 - g))
        for t, g in zip(tokens, gaps, strict=True)
    ]
    outputs = [
        StepOutput(
            request_id="r",
            token_ids=tuple(tokens[i : i + 2]),
            finish_reason=FinishReason.LENGTH if i + 2 >= len(tokens) else None,
            logprobs=tuple(found[i : i + 2]),
        )
        for i in range(0, len(tokens), 2)
    ]
    return Outcome(tokens, outputs)


def test_the_gap_is_that_of_the_first_difference() -> None:
    """Not of a later one; answers that are equal have none."""
    plain = {
        "a": answer([5, 6, 7], [1.0, 2.0, 3.0]),
        "b": answer([5, 6, 7], [0.5, 0.25, 9.0]),
        "c": answer([5, 6, 7], [1.0, 2.0, 4.0]),
    }
    drafted = {
        "a": answer([5, 6, 7], [9.0] * 3),
        "b": answer([5, 8, 9], [9.0] * 3),
        "c": answer([5, 6, 8], [9.0] * 3),
    }
    assert gaps_of(plain, drafted) == pytest.approx([0.25, 4.0])


@pytest.mark.parametrize("name, own", [CASES[0], CASES[-1]], ids=str)
def test_the_comparison_runs(tmp_path: Path, name: str, own: Mapping[str, Any]) -> None:
    """On a CPU, which is batch-invariant, a drafter's answers are the plain ones; some drafts are taken."""
    few = Comparison(tmp_path, "cpu", count=6, max_tokens=24, steps=30)
    rates = few.rates(name, own)
    assert (rates.answers, rates.gaps, rates.largest) == (6, [], 0.0)
    assert rates.accepted > 0
    assert few.anywhere() > 0


def test_every_drafter_is_compared() -> None:
    """Each on the host, each network with its variants, and what is made of one and others."""
    assert {name for name, _ in CASES} == {*DRAFTERS, *NETWORKS, *COMPOSITES} - {"none"}
    assert len({network_cases.case_id(name, own) for name, own in CASES}) == len(CASES)


def test_the_margin_is_the_one_that_is_documented() -> None:
    """Who reads the page knows what is claimed, of whom, and how to see it."""
    says = text("docs/gpu-invariance.md")
    assert f"closer than {MARGIN} nats" in says
    assert f"{RECORD}=" in says
    assert f"vocabulary of {SHAPE['vocab_size']:,}" in says
    assert all(f"`{name}`" in says for name, _ in CASES)


def test_rates_are_written_down_a_row_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again replaces; what another source measured is not mixed in; without a name nothing is written."""
    path = tmp_path / "record.json"
    monkeypatch.delenv(RECORD, raising=False)
    rates = Rates(answers=96, gaps=[0.01, 0.02, 0.06], accepted=50)
    write_down("suffix", rates, 2.5, CPU)
    assert not path.exists()
    monkeypatch.setenv(RECORD, str(path))
    write_down("suffix", Rates(answers=96, gaps=[], accepted=9), 2.5, CPU)
    write_down("ngram", rates, 2.5, CPU)
    write_down("suffix", rates, 2.5, CPU)
    record = json.loads(path.read_text())
    assert record["margin_nats"] == MARGIN
    assert [row["case"] for row in record["rows"]] == ["ngram", "suffix"]
    row = record["rows"][1]
    assert (row["differing"], row["answers"], row["accepted_tokens"]) == (3, 96, 50)
    assert (row["median_gap_nats"], row["largest_gap_nats"]) == (0.02, 0.06)
    assert row["median_gap_anywhere_nats"] == 2.5
    path.write_text(json.dumps({**record, "source": {"commit": "another", "dirty": False}}))
    write_down("eagle3", Rates(answers=96, gaps=[], accepted=9), 2.5, CPU)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["median_gap_nats"], row["largest_gap_nats"]) == ("eagle3", None, 0.0)
