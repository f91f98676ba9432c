"""The first thing to run: a tiny model, every drafter, one answer. Seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline import LLM, SamplingParams
from paceline.draft import DRAFTERS

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

PROMPT = [11, 12, 13, 14, 15] * 4 + [11, 12]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_answers_as_plain_decoding_does(
    tiny_checkpoint: TinyCheckpoint, temperature: float
) -> None:
    """The promise of the whole package: whoever drafts, the tokens are the same."""
    folder = str(tiny_checkpoint("llama"))
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=24, ignore_eos=True)
    answers = {}
    for name in DRAFTERS:
        with LLM(folder, spec=name, dtype="float64", max_len=64, max_rows=2) as llm:
            [result] = llm.generate([PROMPT], params)
        assert len(result.token_ids) == 24
        answers[name] = list(result.token_ids)
    assert answers == dict.fromkeys(DRAFTERS, answers["none"])
