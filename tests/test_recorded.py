"""Tokens of the tiny checkpoints as they were when they were recorded.

A refactoring that changes nothing changes none of them. Where one is meant to change (another noise,
another order of options), record them anew and say so in the changelog, for users' seeds then mean
something else:

    python -m tests.test_recorded
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from paceline.core.request import SamplingParams
from tests import tiny
from tests.conformance.test_drafters import OPTIONS, PROMPTS, params
from tests.engine.harness import engine, request, run

FILE = Path(__file__).parent / "recorded" / "tokens.json"
VARIANTS = ("llama", "mistral", "qwen2", "qwen3-yarn")


def cases() -> dict[str, tuple[list[int], SamplingParams]]:
    """Every option at two temperatures."""
    return {
        f"{prompt}, {option}, {temperature}": (
            PROMPTS[prompt],
            params(option, temperature, max_tokens=12),
        )
        for prompt in ("loop", "mixed")
        for option in OPTIONS
        for temperature in (0.0, 1.0)
    }


def answers(folder: Path, method: str) -> dict[str, list[int]]:
    """What a checkpoint says, all cases in one engine."""
    jobs = [request(name, *case) for name, case in cases().items()]
    return {name: one.tokens for name, one in run(engine(folder, method=method), jobs).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_recorded(tmp_path: Path, variant: str) -> None:
    """A seed means the same tokens today as yesterday."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[variant]
    assert answers(tiny.write_variant(tmp_path, variant), "suffix") == recorded


def main() -> None:
    """Record."""
    found = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            found[variant] = answers(tiny.write_variant(Path(folder), variant), "none")
    lines = [
        f" {json.dumps(variant)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {ids}" for name, ids in sorted(tokens.items()))
        + "\n }"
        for variant, tokens in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
