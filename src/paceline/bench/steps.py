"""Measures steps: what one decode step takes, by drafter, sequences, context and nodes.

Every repeat starts all sequences at the same length (`step_batch.py`) and times steps back to back. The
first one captures graphs and is not counted. Where steps are asked for by part, a second engine runs them
without graphs, with a listener; the two runs never mix.

Not here: what a step could take at best (`cost/model.py`), which cases there are (`step_cases.py`),
records and tables (`step_report.py`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from paceline import models
from paceline.bench.clocks import Clocks, watch
from paceline.bench.fixed_trees import FixedTrees
from paceline.bench.step_batch import Batch
from paceline.bench.step_cases import FIXED, Case, Spec, check_pages, config_of
from paceline.bench.synthetic import SyntheticWalk
from paceline.core.config import DraftConfig, EngineConfig
from paceline.core.device import TORCH_DTYPES, free_cached, used_memory
from paceline.core.garbage import only_new_garbage
from paceline.core.stages import Stages, silent
from paceline.draft import build_network, checkpoint_folder
from paceline.draft.base import Drafter, TargetInfo
from paceline.draft.ddtree import DDTreeDrafter
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.dflash_checkpoint import load as load_dflash
from paceline.engine.build import NetworkMaker, build_parts, load_target, resolve
from paceline.engine.engine import Engine
from paceline.models import LoadedModel
from paceline.models.random_weights import RandomTensors
from paceline.profiling.timeline import Timeline

# In `Engine.report`.
WITHOUT_GRAPH = "num_steps_without_graph"
CAPTURED = "num_graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How steps are measured."""

    steps: int = 32  # of a repeat
    repeats: int = 5
    warmup: int = 4  # steps before those of a repeat
    rest: float = 0.0  # seconds before those: a GPU that comes from rest has its highest clock
    stage_steps: int = 16  # of the run by part; 0: none
    rates: tuple[float, ...] | None = None  # synthetic acceptance; None: what the target accepts
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A case's figures; seconds a step."""

    case: Case
    repeats: tuple[float, ...]  # mean of each repeat
    accept_length: float  # emitted tokens a sequence and step
    without_graph: int  # counted steps that had no graph; on a CPU there are none to be had: 0
    captured: int  # graphs made within the counted steps, which then are too slow
    stages: Mapping[str, float] = field(
        default_factory=dict
    )  # without graphs; empty: not asked for
    ungraphed: float | None = None  # the whole step of that run
    clocks: Clocks | None = None  # of a repeat that is not counted (GPU)


class Bench:
    """One target and the engines that are measured over it, one at a time.

    Args:
        config: device, dtype, cache and threads; the drafter is each spec's own.
        random_weights: make the weights of target and drafters; None: load them.

    Raises:
        ModelError: the model's files are missing, damaged or not supported.
        ConfigError: a value that cannot be served.
    """

    def __init__(self, config: EngineConfig, *, random_weights: int | None) -> None:
        self.config = resolve(replace(config, draft=DraftConfig(method="none")))
        self._seed = random_weights
        self.device = torch.device(self.config.device)
        if self.device.type == "cpu" and self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.loaded = self._load()

    def _load(self) -> LoadedModel:
        if self._seed is None:
            return load_target(self.config)
        return models.load_random(
            models.resolve(self.config.model),
            device=self.device,
            dtype=TORCH_DTYPES[self.config.dtype],
            weights=self.config.weights,
            seed=self._seed,
        )

    @contextmanager
    def engine(
        self,
        spec: Spec,
        cases: Sequence[Case],
        settings: Settings,
        *,
        graphs: bool = True,
        stages: Stages = silent,
    ) -> Iterator[Engine]:
        """An engine with room for all of these cases, for the time of the context.

        Raises:
            ConfigError: the model has no positions for them, or the drafter belongs to another.
            MemoryBudgetError: the device has no memory for them.
        """
        gc.collect()  # the last engine's pool is large, and its parts refer to one another
        free_cached(self.device)
        longest = max(settings.steps, settings.stage_steps) + settings.warmup
        config = config_of(self.config, spec, cases, longest, self.loaded.config.max_position)
        config = replace(config, graphs=config.graphs if graphs else "off")
        make = _maker(spec, self._seed)
        parts = build_parts(config, self.loaded, used_memory(self.device), make)
        check_pages(cases, longest, parts.config.cache, parts.notes[-1])
        parts.alarm.active = False  # that random weights draft in vain is no news
        if settings.rates is not None and spec.nodes > 1:
            walk = SyntheticWalk(settings.rates, num_rows=config.cache.max_rows, device=self.device)
            parts = replace(parts, walk=walk)
        engine = Engine(parts, stages=stages)
        try:
            with only_new_garbage():
                yield engine
        finally:
            engine.close()


def _maker(spec: Spec, seed: int | None) -> NetworkMaker:
    """Who makes the spec's drafter; `seed`: of random weights."""
    if spec.method not in FIXED:
        return build_network if seed is None else random_network(seed)

    def make(_: DraftConfig, target: TargetInfo) -> Drafter:
        return FixedTrees(
            spec.name,
            mean=spec.nodes,
            most=spec.most,
            vocab_size=target.config.vocab_size,
            device=target.device,
        )

    return make


def random_network(seed: int) -> NetworkMaker:
    """Makes DFlash networks of a configuration alone, as drafters."""

    def make(config: DraftConfig, target: TargetInfo) -> Drafter:
        folder = checkpoint_folder.locate(config)
        net = load_dflash(
            folder,
            target,
            lambda net: RandomTensors(
                net, folder, device=target.device, dtype=target.dtype, seed=seed
            ),
        )
        kind = DDTreeDrafter if config.method == "ddtree" else DFlashDrafter
        return kind(config, target, net)

    return make


def run(
    bench: Bench,
    spec: Spec,
    cases: Sequence[Case],
    settings: Settings,
    progress: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Measure every case of a spec.

    Args:
        bench: the target.
        spec: the drafter.
        cases: its sequences and contexts.
        settings: how.
        progress: told after each case and run.

    Raises:
        PacelineError: a sequence ended, or a step was not what was to be measured.
    """
    whole = _whole(bench, spec, cases, settings, progress)
    if not settings.stage_steps:
        return whole
    parts = _parts(bench, spec, cases, settings, progress)
    return [
        replace(measured, stages=stages, ungraphed=seconds)
        for measured, (stages, seconds) in zip(whole, parts, strict=True)
    ]


def _whole(
    bench: Bench,
    spec: Spec,
    cases: Sequence[Case],
    settings: Settings,
    progress: Callable[[], None],
) -> list[Measured]:
    """Every case, as it is served."""
    found = []
    with bench.engine(spec, cases, settings) as engine:
        for case in cases:
            found.append(_timed(engine, case, settings))
            progress()
    return found


def _parts(
    bench: Bench,
    spec: Spec,
    cases: Sequence[Case],
    settings: Settings,
    progress: Callable[[], None],
) -> list[tuple[Mapping[str, float], float]]:
    """Every case without graphs: seconds a step of each part, and of the whole step."""
    found = []
    timeline = Timeline(bench.device)
    with bench.engine(spec, cases, settings, graphs=False, stages=timeline) as engine:
        for case in cases:
            found.append(_by_part(engine, case, settings, timeline))
            progress()
    return found


def _timed(engine: Engine, case: Case, settings: Settings) -> Measured:
    """The case, without its parts."""
    batch = Batch(engine, case, settings.seed)
    batch.prefill()
    times: list[float] = []
    emitted = 0
    counted = dict.fromkeys((WITHOUT_GRAPH, CAPTURED), 0)
    for repeat in range(-1, settings.repeats):
        batch.start()
        time.sleep(settings.rest)
        batch.steps(settings.warmup)
        before = engine.report()
        seconds, tokens = batch.steps(settings.steps)
        after = engine.report()
        if repeat >= 0:
            times.append(seconds / settings.steps)
            emitted += tokens
            for name in counted:
                counted[name] += int(after[name] - before[name])
        batch.stop()

    def again() -> None:
        batch.start()
        batch.steps(settings.warmup + settings.steps)
        batch.stop()

    device = torch.device(engine.config.device)
    clocks = watch(device, again) if device.type == "cuda" else None
    return Measured(
        case=case,
        repeats=tuple(times),
        accept_length=emitted / (len(times) * settings.steps * case.sequences),
        without_graph=counted[WITHOUT_GRAPH],
        captured=counted[CAPTURED],
        clocks=clocks,
    )


def _by_part(
    engine: Engine, case: Case, settings: Settings, timeline: Timeline
) -> tuple[Mapping[str, float], float]:
    """Seconds a step of each part, and of the whole step beside them."""
    batch = Batch(engine, case, settings.seed)
    batch.prefill()
    batch.start()
    batch.steps(settings.warmup)
    timeline.read()
    seconds, _ = batch.steps(settings.stage_steps)
    found = {name: total / settings.stage_steps for name, total in timeline.read().items()}
    batch.stop()
    return found, seconds / settings.stage_steps
