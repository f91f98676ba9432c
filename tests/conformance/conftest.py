"""Checkpoints and trained drafters for all conformance tests, each made once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny, tiny_drafters
from tests.conformance.test_drafters import PROMPTS, autoregressive


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama checkpoint that most tests use."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny checkpoints by variant."""
    return functools.cache(
        lambda variant: tiny.write_variant(tmp_path_factory.mktemp("variant"), variant)
    )


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A network's folder, by its name and its target's folder: trained for some steps on the target's
    answers to `PROMPTS`.
    """
    made: dict[object, Path] = {}

    def folder(name: str, target: Path, steps: int = 80) -> Path:
        build = tiny_drafters.BUILDERS[name]
        if (build, target, steps) not in made:
            texts = [
                [*PROMPTS[prompt], *autoregressive(target, prompt, "plain", temperature)]
                for prompt in PROMPTS
                for temperature in (0.0, 1.0)
            ]
            place = tmp_path_factory.mktemp(name) / "drafter"
            made[build, target, steps] = build(place, target, texts, steps=steps)
        return made[build, target, steps]

    return folder
