"""Engine: token ids in, token ids and statistics out. Single-threaded; no text, no asyncio.

    step():  schedule -> (propose -> select -> verify -> walk -> move -> commit) -> read -> observe

There is one decode path, the verify of a tree; plain decoding is a tree of one node. On a CPU, and
whenever the host must see results first (host drafters, grammars), a step's results are read at once
(lag 0). Otherwise they are read one step later, so that a GPU never waits for the host.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.core.device import (
    TORCH_DTYPES,
    forget_peak,
    free_cached,
    give_back,
    peak_memory,
    slower_dtype,
    used_memory,
)
from paceline.core.errors import EngineStoppedError, RequestError
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.core.request import FinishReason, Request, SamplingParams, StepOutput
from paceline.core.stages import silent
from paceline.draft import build_network
from paceline.engine.beforehand import capture_usual, trial, unheard
from paceline.engine.build import build_parts, load_target, resolve
from paceline.engine.choice import choose_drafter
from paceline.engine.counters import Counters
from paceline.engine.fitness import vet
from paceline.engine.guides import Guide
from paceline.engine.launch import Launcher, Pending
from paceline.engine.limits import kernels_refused, within_memory
from paceline.engine.memory import warm_config
from paceline.engine.reading import Reader
from paceline.engine.sequence import Sequence
from paceline.engine.validate import check_request
from paceline.ops.cpu import native
from paceline.ops.cpu.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.config import EngineConfig, ModelConfig
    from paceline.core.stages import Stages
    from paceline.engine.beforehand import Progress
    from paceline.engine.build import NetworkMaker, Parts
    from paceline.engine.fitness import Probes
    from paceline.models import LoadedModel

# What to do where a GPU's memory is full.
_WEIGHTS = "take a smaller model, free memory of other programs, or use a CPU (device cpu)"
_STEPS = (
    "allow fewer rows (max_rows) or draft nodes (spec_nodes), compute fewer prompt tokens at once "
    "(chunk_size), leave graphs out (graphs off), or use a CPU (device cpu)"
)
_POOL = "give less memory_gb, allow fewer rows (max_rows), or use a CPU (device cpu)"


class Engine:
    """The engine. Build one with `Engine.build(config)`; drive it with `step()`."""

    def __init__(self, parts: Parts, *, stages: Stages = silent) -> None:
        self.config: EngineConfig = parts.config
        self.model_config: ModelConfig = parts.model_config
        self.spec = parts.proposer.spec
        self.notes: tuple[str, ...] = parts.notes
        self.max_len = parts.max_len
        self.counters = Counters()
        self._parts = parts
        self._rows = parts.rows
        self._scheduler = parts.scheduler
        self._proposer = parts.proposer
        self._launcher = Launcher(parts, parts.control, stages)
        self._seeds = random.Random(parts.config.seed)  # noqa: S311 (sampling seeds, no secrets)
        self._sequences: dict[str, Sequence] = {}
        self._reader = Reader(parts, self.counters, self._sequences)
        self._pending: deque[Pending] = deque()
        self._aborted: list[Sequence] = []
        self._arrivals = 0
        self._closed = False
        self._max_draft = min(parts.config.draft.num_speculative_tokens, self.spec.max_nodes - 1)
        on_gpu = parts.device.type == "cuda"
        needs_text = self._max_draft > 0 and parts.proposer.needs_text
        self.lag = 1 if on_gpu and not needs_text else 0

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        stages: Stages = silent,
        probes: Callable[[], Probes] | None = None,
        progress: Progress | None = None,
        make_network: NetworkMaker = build_network,
    ) -> Engine:
        """Load the model, size the memory and return a ready engine.

        Args:
            config: what to build.
            loaded: a model loaded before with the same model, device, dtype and weights, to be
                shared with another engine.
            stages: who measures the parts of a step.
            probes: what to test a drafter network on that was not yet tested with this model (see
                `fitness`); None: it is served untested.
            progress: told how many graphs are captured, and of how many (GPU).
            make_network: makes a drafter network; default: from the folder that the config names.

        Raises:
            ConfigError: a value that cannot be served, a budget that does not hold one sequence, a
                drafter that does not belong to the model.
            ModelError: files that are missing, damaged or unsupported.
        """
        resolved = resolve(config)
        device = torch.device(resolved.device)
        if device.type == "cpu" and resolved.threads is not None:
            torch.set_num_threads(resolved.threads)
        if loaded is None:
            with within_memory(f"loading {resolved.model} in {resolved.dtype}", device, _WEIGHTS):
                loaded = load_target(resolved)
        draft, chosen = choose_drafter(resolved.draft, loaded.files)
        resolved = replace(resolved, draft=draft)
        used, graph_bytes = used_memory(device), None
        if resolved.cache.memory_gb is not None or device.type == "cuda":
            with within_memory("a step of full size", device, _STEPS):
                used, graph_bytes = cls._measured(
                    warm_config(resolved, loaded.config), loaded, make_network
                )
        if probes is not None:  # after the measurement: what it takes is free again by then
            model = loaded
            chosen += vet(
                resolved, model, probes, lambda plain: cls(build_parts(plain, model, used))
            )
            free_cached(device)
        with within_memory("the KV pool with the rows' tables", device, _POOL):
            parts = build_parts(resolved, loaded, used, make_network, graph_bytes)
        slower = slower_dtype(device, native.refusal(torch.bfloat16))
        says = slower is not None and config.dtype == "auto"
        own = kernels_refused(device, TORCH_DTYPES[resolved.dtype])
        said = (*chosen, *([f"dtype: {slower}"] if says else []), *own, *parts.notes)
        engine = cls(replace(parts, notes=said), stages=stages)
        graphs = engine._launcher.graphs
        if graphs is not None and resolved.graphs == "beforehand":
            engine.notes += (capture_usual(graphs, progress=progress or unheard),)
        return engine

    @classmethod
    def _measured(
        cls, warm: EngineConfig, loaded: LoadedModel, make_network: NetworkMaker
    ) -> tuple[int, int | None]:
        """Bytes that weights and work space take, and those to set aside for graphs (None: no graphs).

        Args:
            warm: from `warm_config`.
            loaded: the target.
            make_network: as for `build`.
        """
        device, graph_bytes = torch.device(warm.device), None
        give_back(device)  # an engine before this one may have filled the GPU
        forget_peak(device)
        held = used_memory(device)
        engine = cls(build_parts(warm, loaded, 0, make_network))
        engine._warm_up()
        if engine._launcher.graphs is not None:
            graph_bytes = trial(engine._launcher.graphs)
        used = max(held, peak_memory(device))
        del engine
        give_back(device)
        return used, graph_bytes

    def _warm_up(self) -> None:
        """One EXTEND of a full chunk and one BLOCK of all rows, through the normal path."""
        rows, room = self.config.cache.max_rows, self.max_len - 2
        long = min(self.config.cache.chunk_size, room)
        for i in range(rows):
            length = max(1, long - rows + 1) if i == 0 else 1
            params = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True)
            self.add(Request(id=f"warm-{i}", prompt_ids=(0,) * length, params=params))
        while self.has_work:
            self.step()

    @property
    def loaded(self) -> LoadedModel:
        """The target's weights, to be shared with another engine through `build`."""
        return self._parts.loaded

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        busy = self._pending or self._aborted or self._scheduler.has_work
        return bool(busy) and not self._closed

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row yet."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._scheduler.running)

    def draw_seed(self) -> int:
        """A fresh seed for a request that states none."""
        return self._seeds.getrandbits(63)

    def add(self, request: Request) -> int:
        """Queue a request.

        Returns:
            The seed that its noise is keyed by; the same seed repeats the same tokens.

        Raises:
            RequestError: the request cannot be served; others are not disturbed.
            EngineStoppedError: the engine was closed.
        """
        if self._closed:
            msg = "the engine was closed and takes no more requests; build a new one to go on"
            raise EngineStoppedError(msg)
        if request.id in self._sequences:
            msg = f"request id {request.id!r} is in use; give each request an id of its own"
            raise RequestError(msg)
        vocab_size = self.model_config.vocab_size
        check_request(request, vocab_size, self.max_len, (self.spec.name, *self.spec.parts))
        self._parts.rows.options.check(request.params)
        seed = self.draw_seed() if request.params.seed is None else request.params.seed
        sequence = Sequence(
            request=request,
            seed=seed,
            limit=min(len(request.prompt_ids) + request.params.max_tokens, self.max_len),
            arrival=self._arrivals,
            tokens=list(request.prompt_ids),
            guide=None if request.grammar is None else Guide(request.grammar, vocab_size),
        )
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)
        return seed

    def abort(self, request_id: str) -> None:
        """End a request at once; unknown or finished ids are ignored (it may just have finished)."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.finish is not None:
            return
        self._reader.end(sequence, FinishReason.ABORT)
        self._aborted.append(sequence)

    def step(self, meanwhile: Meanwhile = nothing) -> list[StepOutput]:
        """Compute one step and return what became known, in no particular order.

        Args:
            meanwhile: see `core.meanwhile`.
        """
        # Where own kernels do the work, what PyTorch does between them is small.
        with one_thread() if self._parts.target.fused else nullcontext():
            return self._step(meanwhile)

    def _step(self, meanwhile: Meanwhile) -> list[StepOutput]:
        outputs = self._reap_aborted()
        plan = self._scheduler.schedule(self._max_draft)
        if plan is not None:
            self._pending.append(self._launcher.launch(plan, meanwhile))
        else:
            meanwhile()  # before anything is read: text goes out with the tokens that it belongs to
        lag = 0 if self._scheduler.has_grammar else self.lag
        while self._pending and (plan is None or len(self._pending) > lag):
            outputs += self._reader.read(self._pending.popleft())
        return outputs

    def close(self) -> None:
        """Drop all requests without stepping on; the engine takes no new ones."""
        self._closed = True
        self._pending.clear()
        self._aborted.clear()
        self._sequences.clear()

    def check_integrity(self) -> None:
        """Assert the invariants of rows and pages; for tests and idle moments."""
        self._scheduler.check_integrity()

    def report(self) -> dict[str, float]:
        """Counters since the start, for logs and metrics."""
        graphs = self._launcher.graphs
        return {
            **self.counters.as_dict(),
            "num_graphs": 0.0 if graphs is None else float(graphs.num_captured),
            "graph_seconds": 0.0 if graphs is None else graphs.seconds,
            "graph_bytes": 0.0 if graphs is None else float(graphs.nbytes),
            "num_steps_without_graph": 0.0 if graphs is None else float(graphs.num_eager),
            **self._scheduler.report(),
        }

    def _reap_aborted(self) -> list[StepOutput]:
        outputs = []
        for sequence in self._aborted:
            self._reader.retire(sequence)
            outputs.append(
                StepOutput(
                    request_id=sequence.request.id,
                    token_ids=(),
                    finish_reason=FinishReason.ABORT,
                    stats=sequence.stats(),
                )
            )
        self._aborted = []
        return outputs
