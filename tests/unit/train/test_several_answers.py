"""Answers of several runs used as one run's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.prepare import PromptFacts, together
from paceline.train.settle import settle
from paceline.train.shards import Doc, Shards, ShardWriter


def lender(folder: Path, **settings: object) -> Path:
    """A run that made answers."""
    settle(folder, {"own_share": 1.0, "steps": 1, **settings}, DFlashSettings)
    return folder


def test_settings_come_from_all_that_lend(tmp_path: Path) -> None:
    """Seeds and numbers may differ; a run named twice, or through another, lends once."""
    one = lender(tmp_path / "one", seed=1, temperatures=(0.0, 0.5))
    two = lender(tmp_path / "two", seed=2, temperatures=(0.0, 0.5), answer_tokens=7)
    both = tmp_path / "both"
    found = settle(both, {"answers": (one, two, one), "steps": 1}, Eagle3Settings)
    assert found.answers == (one, two)
    assert found.temperatures == (0.0, 0.5)
    assert settle(both, {}, Eagle3Settings) == found
    through = settle(tmp_path / "x", {"answers": (both, two), "steps": 1}, Eagle3Settings)
    assert through.answers == (one, two)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"seed": 2, "temperatures": (1.0,)},
            "temperatures (1.0,) instead of (0.0, 0.0, 0.7, 1.0)",
        ),
        ({"seed": 2, "held_out": 0.5}, "held_out 0.5 instead of 0.01"),
        ({"seed": 1}, "with the same seed 1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    """Other temperatures, another share held out, or the same answers twice."""
    one = lender(tmp_path / "one", seed=1)
    two = lender(tmp_path / "two", **settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        settle(tmp_path / "both", {"answers": (one, two), "steps": 1}, Eagle3Settings)
    assert not (tmp_path / "both" / "settings.json").exists()


def test_shards_of_several_folders_are_one_list(tmp_path: Path) -> None:
    """Folders in their order, an empty one among them."""
    docs = [Doc(token_ids=[n, n + 1], num_prompt=1, job=n) for n in range(5)]
    for name, part, limit in (("a", docs[:3], 4), ("b", [], 4), ("c", docs[3:], 100)):
        writer = ShardWriter(tmp_path / name, 97, {}, limit)
        for doc in part:
            writer.add(doc)
        writer.flush()
    found = Shards(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert len(found) == 5
    assert found.num_answer_tokens == 5
    assert [found.tokens(n).tolist() for n in range(5)] == [d.token_ids for d in docs]


def test_prompts_of_several_runs() -> None:
    """Sums, but for files that were named twice."""
    a = facts({"a": "1"}, {"x": 3})
    b = facts({"b": "2"}, {"x": 3, "y": 1})
    found = together([a, b, a])
    assert found.files == {"a": "1", "b": "2"}
    assert found.sources == {"x": 6, "y": 1}
    assert (found.num_prompts, found.num_too_long, found.num_broken) == (20, 2, 4)


def facts(files: dict[str, str], sources: dict[str, int]) -> PromptFacts:
    return PromptFacts(files=files, num_prompts=10, num_too_long=1, num_broken=2, sources=sources)
