"""The card and the record of a finished drafter: what it is, how well it drafts, how it came about."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import paceline
from paceline.models.atomic import replacing

if TYPE_CHECKING:
    from paceline.train.methods import Words
    from paceline.train.prepare import PromptFacts
    from paceline.train.settings import TrainSettings
    from paceline.train.state import Journey

SHARD_BYTES = 15_000_000  # of a file; code hosts and transfers balk at larger ones
CARD, RECORD = "card.md", "record.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What the card tells."""

    words: Words
    settings: TrainSettings
    journey: Journey
    prompts: PromptFacts
    num_answers: int
    num_answer_tokens: int
    num_own: int  # answers to prompts of the target's own
    curve: Sequence[Mapping[str, object]]
    engine: Mapping[str, float]  # candidate -> accept length in the engine
    chosen: str
    command: str
    device: str


def write_story(folder: Path, story: Story) -> None:
    """Add card and record to an exported drafter.

    Raises:
        OSError: the folder is missing, read-only or full.
    """
    with replacing(folder / CARD) as file:
        file.write(card(story).encode())
    with replacing(folder / RECORD) as file:
        file.write(json.dumps(record(story), indent=1, ensure_ascii=False).encode() + b"\n")


def record(story: Story) -> dict[str, object]:
    """Everything about the run, as JSON's types."""
    from paceline.train.settings import as_json

    return {
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": story.device,
        "command": _without_folders(story.command),
        "settings": _nameless(as_json(story.settings)),
        **story.words.facts,
        "parameters": story.words.num_parameters,
        "steps": story.journey.step,
        "anchors": story.journey.num_anchors,
        "train_seconds": round(story.journey.seconds, 1),
        "answers": story.num_answers,
        "answer_tokens": story.num_answer_tokens,
        "engine": dict(story.engine),
        "chosen": story.chosen,
        "curve": [dict(line) for line in story.curve],
    }


def card(story: Story) -> str:
    """The card, Markdown."""
    words, settings, journey = story.words, story.settings, story.journey
    engine = ", ".join(f"{name} {value:.2f}" for name, value in story.engine.items())
    measured = (
        f"In the engine, greedy, on held-out prompts: {engine}; shipped is `{story.chosen}`."
        if engine
        else "Not measured in the engine."
    )
    sources = "\n".join(f"| {name} | {n} |" for name, n in story.prompts.sources.items())
    points = "\n".join(
        f"| {line['step']} | {line['seconds']} | {line['accept_length']} |"
        for line in story.curve
        if line.get("kind") == "held_out"
    )
    begun = ""
    if settings.init is not None:
        begun = f" begun from the weights in `{settings.init.name}`;"
    return f"""# {words.title}

{words.about}

## Accept length

{measured}

Along the way, read off held-out greedy answers (tokens per verify, bonus included, token-weighted):

| step | seconds | accept length |
|---|---|---|
{points}

## Data

{story.num_answers} answers, {story.num_answer_tokens} tokens, all made by the target itself, at temperatures
{", ".join(f"{t:g}" for t in settings.temperatures)} in equal parts, up to {settings.max_new_tokens} tokens each.
{story.num_own} of them answer prompts that the target made (sampled after the opening of a user's turn), the
others these prompts; {settings.held_out:.1%} of all prompts, by hash, were held out and never trained on.

| source of prompts (licence) | prompts |
|---|---|
{sources}

## Recipe

{journey.step} steps of {settings.batch_rows} rows of {settings.row_tokens} tokens, {journey.num_anchors:,}
{words.recipe};{begun} AdamW, learning rate {settings.lr:g},
{settings.warmup} steps of warm-up, cosine to zero, gradient norm at most {settings.clip:g}; seed {settings.seed}.
{journey.seconds / 3600:.2f} hours of training on {story.device}.

    {_without_folders(story.command)}

## Licences

The weights are the project's own work under its licence (Apache-2.0). They were trained on text made by the
target, whose licence applies to the target; the prompts' licences are in the table above. No prompt text is
part of the weights' files.
"""


def weighing(settings: TrainSettings) -> str:
    """The weights of a block's rows, or of a chain's steps, in words."""
    kind = "D-PACE (arXiv 2605.18810) times decay" if settings.loss == "dpace" else "decay"
    return f"{kind} (gamma {settings.gamma:g})"


def bare(path: str) -> str:
    """The last part of an absolute path: where things lay concerns nobody. Other names are whole."""
    return path.rstrip("/").rsplit("/", 1)[-1] if path.startswith("/") else path


def _without_folders(command: str) -> str:
    return " ".join(bare(word) for word in command.split(" "))


def _nameless(value: object) -> object:
    """JSON's types with `bare` paths."""
    if isinstance(value, dict):
        return {key: _nameless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nameless(item) for item in value]
    return bare(value) if isinstance(value, str) else value
