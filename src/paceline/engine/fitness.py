"""Fitness: whether a drafter network belongs to its target, tested once before an engine serves the two.

A network that was made for another target, or whose vocabulary map is wrong, drafts in vain and says
nothing. So the target answers a few prompts greedily, and `draft/selftest.py` compares what the network
drafts in them. What was found is kept in the cache folder under the digests of both, so a second start
asks no more. Drafters that come with Paceline for just this target were tested when they were made.

Not here: which prompts (whoever has a tokenizer brings them), and what the figures mean (`selftest.py`).
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

from paceline.core.config import CacheConfig, DraftConfig
from paceline.core.errors import ConfigError, MemoryBudgetError
from paceline.core.request import Request, SamplingParams, StepOutput
from paceline.draft import checkpoint_folder, network_of, shipped
from paceline.draft.base import TargetInfo
from paceline.draft.selftest import SUBJECTS, Outcome, Text, examine
from paceline.models.atomic import replacing
from paceline.models.cache import cache_folder, digest, folder_digest

if TYPE_CHECKING:
    from paceline.core.config import EngineConfig
    from paceline.models import LoadedModel
    from paceline.models.source import ModelFiles

log = logging.getLogger(__name__)  # the command line shows its INFO too: a start takes longer

_FORMAT = 1  # of what is kept; also changes when the test does
_MAX_TOKENS = 48  # of an answer: with the built-in prompts, some 200 places
_LEAST_ANSWER = 2  # tokens; the first is a root, the second can be drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What a drafter is tested on."""

    prompts: Sequence[Sequence[int]]  # token ids
    stop_ids: frozenset[int]  # what ends an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    """What a test found."""

    outcome: Outcome
    advice: str  # the figures, what they mean and what to do


class Answering(Protocol):
    """The part of an engine that answers need."""

    max_len: int

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        ...

    def add(self, request: Request) -> int:
        """Queue a request."""
        ...

    def step(self) -> list[StepOutput]:
        """Compute one step."""
        ...


def answers(engine: Answering, probes: Probes, max_tokens: int) -> list[Text]:
    """What the target answers at temperature 0; what leaves nothing to draft in is left out.

    Args:
        engine: without a drafter.
        probes: the prompts.
        max_tokens: longest answer.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    said: dict[str, list[int]] = {}
    for i, prompt in enumerate(probes.prompts):
        if len(prompt) + _LEAST_ANSWER <= engine.max_len:
            said[str(i)] = list(prompt)
            engine.add(
                Request(id=str(i), prompt_ids=prompt, params=params, stop_ids=probes.stop_ids)
            )
    while engine.has_work:
        for out in engine.step():
            said[out.request_id].extend(out.token_ids)
    texts = [
        Text(tokens=tokens, num_prompt=len(probes.prompts[int(i)])) for i, tokens in said.items()
    ]
    return [text for text in texts if len(text.tokens) >= text.num_prompt + _LEAST_ANSWER]


def plain_config(config: EngineConfig, model_max_len: int, probes: Probes) -> EngineConfig:
    """The same engine without a drafter, with room for the probes and no more.

    Args:
        config: resolved.
        model_max_len: the model's own context window, tokens.
        probes: what it is to answer.
    """
    longest = max(map(len, probes.prompts), default=1)
    cache = CacheConfig(
        page_size=config.cache.page_size,
        max_len=min(model_max_len, longest + _MAX_TOKENS + 1),
        max_rows=max(1, len(probes.prompts)),
        prefix_cache=False,
        chunk_size=config.cache.chunk_size,
    )
    alone = DraftConfig(method="none", num_speculative_tokens=0)
    return replace(config, cache=cache, draft=alone, graphs="off")


def vet(
    config: EngineConfig,
    loaded: LoadedModel,
    probes: Callable[[], Probes],
    build: Callable[[EngineConfig], Answering],
) -> tuple[str, ...]:
    """Test the drafter network of a config, if it has one that must be tested.

    Args:
        config: resolved; `draft` too.
        loaded: the target.
        probes: asked for if a test is made.
        build: an engine over the loaded target.

    Returns:
        What to tell people.

    Raises:
        ConfigError: the drafter was made for another target, or its vocabulary map is wrong; also
            what loading it raises.
        ModelError: its files are missing, damaged or unsupported.
    """
    network = network_of(config.draft)
    if network is None or network.check == "off" or not network.num_speculative_tokens:
        return ()
    folder = checkpoint_folder.locate(network)
    try:
        target, drafter = _target_digest(loaded.files), folder_digest(folder)
    except OSError as error:
        log.debug("%s is not tested, files cannot be read: %s", folder, error)
        return ()  # loading it says what is wrong
    if shipped.is_shipped(target, drafter):
        return ()
    kept = _kept_at(target, drafter)
    found = _recall(kept, target, drafter)
    level = logging.DEBUG if found is not None else logging.INFO
    if found is None:
        log.info(
            "testing whether the drafter in %s belongs to this model (once; --spec-check off skips it)",
            folder,
        )
        found = _tested(config, network, loaded, probes(), build)
        if found is None:
            log.warning(
                "the drafter in %s could not be tested on this model, which answered no prompt with "
                "two tokens or more in the memory that is free; it is served untested",
                folder,
            )
            return ()
        _keep(kept, found, target, drafter)
    return _judged(found, folder, level)


def _judged(found: Fitness, folder: Path, level: int) -> tuple[str, ...]:
    """Refuse, warn, or say at the given level of logging that all is well."""
    if found.outcome in {"another target", "wrong map"}:
        msg = (
            f"the drafter in {folder} does not belong to this model ({found.outcome}): {found.advice} "
            "A drafter that fits is served without a question; 'paceline check drafter' shows all "
            "figures, and --spec-check off (spec_check='off') serves this one as it is."
        )
        raise ConfigError(msg)
    note = f"drafter in {folder}: {found.outcome}: {found.advice}"
    log.log(logging.WARNING if found.outcome == "misread" else level, "%s", note)
    return (note,)


def _tested(
    config: EngineConfig,
    network: DraftConfig,
    loaded: LoadedModel,
    probes: Probes,
    build: Callable[[EngineConfig], Answering],
) -> Fitness | None:
    """Run the test; None where the target says nothing to draft in."""
    net = loaded.net
    subject = SUBJECTS.get(network.method)(
        network,
        TargetInfo(
            config=loaded.config, device=net.device, dtype=net.dtype, embed=net.embed, head=net.head
        ),
    )
    try:
        engine = build(plain_config(config, loaded.config.max_position, probes))
    except MemoryBudgetError as error:
        log.debug("no memory for a test: %s", error)
        return None
    stop_ids = probes.stop_ids | set(loaded.config.eos_token_ids)
    texts = answers(engine, replace(probes, stop_ids=stop_ids), _MAX_TOKENS)
    if not texts:
        return None
    report = examine(subject, net, texts, net.device)
    del engine, subject, texts
    gc.collect()  # engines hold cycles, and the next one takes what memory is free
    return Fitness(outcome=report.outcome, advice=report.advice)


def _target_digest(files: ModelFiles) -> str:
    return digest(files.path) if files.kind == "gguf" else folder_digest(files.path)


def _kept_at(target: str, drafter: str) -> Path | None:
    """Where the outcome for this pair is kept; None without a cache folder."""
    try:
        return cache_folder() / "fitness" / f"{target[:24]}-{drafter[:24]}.json"
    except OSError as error:
        log.debug("no cache folder: %s", error)
        return None


def _recall(path: Path | None, target: str, drafter: str) -> Fitness | None:
    """What was found before; None if nothing was, or it can't be read."""
    if path is None:
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if (kept["format"], kept["target"], kept["drafter"]) != (_FORMAT, target, drafter):
            return None
        outcome, advice = kept["outcome"], kept["advice"]
        if outcome in get_args(Outcome) and isinstance(advice, str):
            return Fitness(outcome=outcome, advice=advice)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.debug("%s is damaged, testing anew: %r", path, error)
    return None


def _keep(path: Path | None, found: Fitness, target: str, drafter: str) -> None:
    """Keep what was found; a cache that can't be written costs the next start a test."""
    if path is None:
        return
    state = {
        "format": _FORMAT,
        "target": target,
        "drafter": drafter,
        "outcome": found.outcome,
        "advice": found.advice,
    }
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as out:
            out.write(json.dumps(state).encode("utf-8"))
    except OSError as error:
        log.debug("the test of %s is not remembered: %s", path.name, error)
