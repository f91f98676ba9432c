"""Run: a folder, its settings, and the target once it is needed.

RUN/settings.json     what the run is
RUN/prompts/          prepared prompts
RUN/answers/          the target's answers
RUN/state.safetensors, curve.jsonl, last/, best/
RUN/export/           the drafter to ship, with card.md and record.json

Not here: what is done in it (`stages.py`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from paceline import models
from paceline.core.config import CacheConfig, DraftConfig, DType, EngineConfig, ModelConfig
from paceline.core.device import TORCH_DTYPES, choose_device
from paceline.engine.engine import Engine
from paceline.models.cache import digest
from paceline.train.prepare import ChatTokenizer
from paceline.train.progress import Progress
from paceline.train.settings import TrainSettings
from paceline.train.settle import settle
from paceline.train.shards import Shards

if TYPE_CHECKING:
    from paceline.models import LoadedModel

S = TypeVar("S", bound=TrainSettings)

_CHUNK = {"cuda": 8192, "cpu": 512}  # prompt tokens of a prefill step


@dataclass(slots=True, kw_only=True)
class Run(Generic[S]):
    """A run's folder, its settings, and the target once it is needed."""

    folder: Path
    settings: S
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
    def sources(self) -> tuple[Path, ...]:
        """Folders that have `prompts` and `answers`: this run's, or those that it borrows from."""
        return self.settings.answers or (self.folder,)

    @property
    def answers(self) -> Shards:
        """The answers to train on and to measure with, as they are now."""
        return Shards(*(source / "answers" for source in self.sources))

    @property
    def answers_about(self) -> dict[str, object]:
        """What the folder of answers must say about itself."""
        return {"vocab_size": self.model_config.vocab_size, "model": self.model_digest}

    @property
    def compiled(self) -> bool:
        """Whether networks in training go through torch.compile."""
        asked = self.settings.compile
        return self.device.type == "cuda" if asked is None else asked

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
            graphs="on-demand",  # a run has few kinds of steps, and many engines
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

    def free_memory(self) -> None:
        """Give memory of dropped engines back before the next large allocation."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def open_run(
    kind: type[S],
    folder: Path,
    given: Mapping[str, object],
    tokenizer_of: Callable[[Path], ChatTokenizer],
    progress: Progress,
    command: str,
) -> Run[S]:
    """Begin a run, or open one to go on with it.

    Args:
        kind: what is trained.
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
    settings = settle(folder, given, kind)
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
