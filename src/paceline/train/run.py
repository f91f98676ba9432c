"""One run from prompts to an exported drafter; each stage goes on where the last call stopped.

RUN/settings.json     what the run is
RUN/prompts/          prepared prompts
RUN/answers/          the target's answers
RUN/state.safetensors, curve.jsonl, last/, best/
RUN/export/           the drafter to ship, with card.md and record.json
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline import models
from paceline.core.config import CacheConfig, DraftConfig, DType, EngineConfig, ModelConfig
from paceline.core.device import TORCH_DTYPES, choose_device
from paceline.core.errors import ConfigError
from paceline.engine.engine import Engine
from paceline.models.atomic import replacing
from paceline.models.cache import digest
from paceline.train.generate import Generator
from paceline.train.jobs import JobList
from paceline.train.prepare import ChatTokenizer, facts, prepare
from paceline.train.progress import Progress
from paceline.train.settings import FREE, PER_CALL, TrainSettings, as_json
from paceline.train.shards import Shards, ShardWriter
from paceline.train.trainer import STATE

if TYPE_CHECKING:
    from paceline.models import LoadedModel

log = logging.getLogger(__name__)

_SETTINGS = "settings.json"
_CHUNK = {"cuda": 8192, "cpu": 512}  # prompt tokens of a prefill step


@dataclass(slots=True, kw_only=True)
class Run:
    """A run's folder, its settings, and the target once it is needed."""

    folder: Path
    settings: TrainSettings
    tokenizer: ChatTokenizer
    model_config: ModelConfig
    model_digest: str
    device: torch.device
    dtype: DType
    progress: Progress
    deadline: float | None  # `time.perf_counter()` seconds
    command: str
    _loaded: LoadedModel | None = field(default=None, repr=False)

    @property
    def loaded(self) -> LoadedModel:
        """The target with plain weights, loaded once."""
        if self._loaded is None:
            self._loaded = models.load(
                models.resolve(self.settings.model),
                device=self.device,
                dtype=TORCH_DTYPES[self.dtype],
                weights="bf16",
            )
        return self._loaded

    @property
    def stop_ids(self) -> frozenset[int]:
        """What ends an answer."""
        return frozenset(self.tokenizer.eos_token_ids) | frozenset(self.model_config.eos_token_ids)

    def engine(self, draft: DraftConfig, rows: int) -> Engine:
        """An engine over the loaded target, with rows for so many answers at once."""
        config = EngineConfig(
            model=self.settings.model,
            device=str(self.device),
            dtype=self.dtype,
            weights="bf16",
            batch_invariant=False,
            seed=self.settings.seed,
            cache=CacheConfig(
                max_len=min(self.settings.row_room, self.model_config.max_position),
                max_rows=rows,
                prefix_cache=False,
                chunk_size=_CHUNK[self.device.type],
            ),
            draft=draft,
        )
        return Engine.build(config, loaded=self.loaded)

    def time_is_up(self) -> bool:
        """Whether this call must stop."""
        return self.deadline is not None and time.perf_counter() >= self.deadline


def open_run(
    folder: Path,
    given: Mapping[str, object],
    tokenizer_of: Callable[[Path], ChatTokenizer],
    progress: Progress,
    command: str,
) -> Run:
    """Begin a run, or open one to go on with it.

    Args:
        folder: of the run; made if it is missing.
        given: settings that this call states; the others are as before, or the defaults.
        tokenizer_of: reads the tokenizer that belongs to a model's folder or file.
        progress: told how far the stages are.
        command: as it was called, for the card.

    Raises:
        ConfigError: a setting is invalid, or is not what it was in this run's first call.
        ModelError: the target's files are missing, damaged or unsupported.
    """
    started = time.perf_counter()
    settings = settle(folder, given)
    files = models.resolve(settings.model)
    device = choose_device(settings.device)
    dtype = settings.dtype
    if dtype == "auto":  # float32 on a CPU: few have fast 16-bit products for training
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    weights = files.path
    if files.kind == "folder":
        weights = min(files.path.glob("*.safetensors"), default=files.path / "config.json")
    minutes = settings.minutes
    return Run(
        folder=folder,
        settings=settings,
        tokenizer=tokenizer_of(files.path),
        model_config=models.read_config(files),
        model_digest=digest(weights)[:16],
        device=device,
        dtype=dtype,
        progress=progress,
        deadline=None if minutes is None else started + 60 * minutes,
        command=command,
    )


def settle(folder: Path, given: Mapping[str, object]) -> TrainSettings:
    """Settings of a run: those of its first call, with what this call may and does change.

    Raises:
        ConfigError: see `open_run`.
    """
    path = folder / _SETTINGS
    try:
        before = _from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        settings = TrainSettings(**dict(given))  # type: ignore[arg-type]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        msg = f"{path} is damaged ({error!r}); use another run folder"
        raise ConfigError(msg) from error
    else:
        changed = [
            f"{name} was {getattr(before, name)!r}, now {value!r}"
            for name, value in given.items()
            if name not in FREE | PER_CALL and value != getattr(before, name)
        ]
        if changed:
            msg = (
                f"{folder} holds a run with other settings: {'; '.join(changed)}; only "
                f"{', '.join(sorted(FREE | PER_CALL))} may change between calls. Leave these flags "
                "out, or use another run folder."
            )
            raise ConfigError(msg)
        rest = dict(given)
        if "steps" in rest:  # the two say the same thing in two ways
            rest.setdefault("train_minutes", None)
        elif "train_minutes" in rest:
            rest.setdefault("steps", None)
        settings = replace(before, **rest)  # type: ignore[arg-type]
    settings.check()
    folder.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in as_json(settings).items() if k not in PER_CALL}
    with replacing(path) as file:
        file.write(json.dumps(kept, indent=1).encode())
    return settings


def _from_json(values: dict[str, Any]) -> TrainSettings:
    defaults = TrainSettings()
    known = {f.name for f in fields(TrainSettings)}
    made = {}
    for name, value in values.items():
        if name not in known:
            raise KeyError(name)
        if isinstance(getattr(defaults, name), tuple):
            value = tuple(Path(v) if name == "prompts" else v for v in value)  # noqa: PLW2901
        elif name == "init" and value is not None:
            value = Path(value)  # noqa: PLW2901
        made[name] = value
    return TrainSettings(**made)


def go(run: Run, train: Callable[[Run], bool], finish: Callable[[Run], None]) -> bool:
    """Go through the stages asked for.

    Args:
        run: from `open_run`.
        train: the method's own training; returns whether it is complete.
        finish: measures and exports.

    Returns:
        Whether all of them are complete; False: time was up, so call again.
    """
    stages = run.settings.stages
    if "prepare" in stages:
        prepare(
            run.settings.prompts,
            run.folder / "prompts",
            run.tokenizer,
            vocab_size=run.model_config.vocab_size,
            broken=run.settings.broken,
            max_tokens=run.settings.max_prompt_tokens,
            held_out=run.settings.held_out,
        )
    if "generate" in stages and not generate(run):
        return False
    if "train" in stages and not train(run):
        return False
    if "finish" in stages:
        if run.time_is_up():
            return False
        finish(run)
    return True


def generate(run: Run) -> bool:
    """Make answers until there are enough, or until their share of time is used.

    Returns:
        Whether the run may go on; False: this call's time is up.
    """
    if (run.folder / STATE).exists():
        return True  # a drafter is being trained on them: they must not change
    if facts(run.folder / "prompts") is None:
        msg = f"{run.folder} has no prepared prompts; run the stage 'prepare' first"
        raise ConfigError(msg)
    prompts = Shards(run.folder / "prompts")
    target = {"model": run.model_digest}
    writer = ShardWriter(run.folder / "answers", run.model_config.vocab_size, target)
    before = Shards(run.folder / "answers")
    goal = run.settings.answer_tokens - before.num_answer_tokens
    if goal <= 0:
        return True
    share = run.settings.generate_minutes
    own = None if share is None else time.perf_counter() + 60 * share
    limits = [limit for limit in (run.deadline, own) if limit is not None]
    settings = run.settings
    jobs = JobList(len(prompts), settings.temperatures, settings.own_share, settings.seed)
    engine = run.engine(DraftConfig(method="none", num_speculative_tokens=0), settings.max_rows)
    generator = Generator(
        engine, run.tokenizer, prompts, writer, settings, frozenset(before.docs["job"].tolist())
    )
    generator.run(jobs, goal, min(limits, default=None), run.progress)
    engine.close()
    del engine, generator
    free_memory(run.device)
    return not run.time_is_up()


def free_memory(device: torch.device) -> None:
    """Give memory of dropped engines back before the next large allocation."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
