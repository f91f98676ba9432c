"""Metrics: what Prometheus reads. One object per app, with a registry of its own.

What requests go through is counted here as it happens; the engine's counters are read when somebody
asks for /metrics. Names are vLLM's, under `paceline:`; a switch exports those that vLLM has under
`vllm:` too. Label `engine` is "0": one engine stands behind an app.

An answer's *gap* is the time between two of its chunks, each of which may hold several tokens: use
`request_time_per_output_token_seconds` to compare with engines that send token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.process_collector import ProcessCollector

from paceline.api.server import vain
from paceline.api.server.engine_metrics import EngineMetrics
from paceline.api.server.metrics_names import VLLM, Renamed
from paceline.api.server.tallies import Tallies, Tally, Total

if TYPE_CHECKING:
    from paceline.api.results import Result
    from paceline.api.server.job import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
_SECONDS = (*_SHORT, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_STAGE = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.128, 0.256, 0.5, 1)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_FEW = (1, 2, 5, 10, 20, 50, 128)


class Metrics:
    """Counts for one app; a `Listener` of its service, and of the engine's stages (`observe_stage`).

    Args:
        model: label `model_name`.
        num_positions: depths of draft trees, which are told from the beginning.
        vllm_names: export under `vllm:` too.
    """

    def __init__(self, model: str, *, num_positions: int = 0, vllm_names: bool = False) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._vain = vain.Vain()
        self._registry = CollectorRegistry()
        self._out = CollectorRegistry()
        self._out.register(Renamed(self._registry, "paceline:", None))
        if vllm_names:
            self._out.register(Renamed(self._registry, "vllm:", VLLM))
        ProcessCollector(registry=self._out)
        self._engine = EngineMetrics(self._labels, num_positions)
        self._registry.register(self._engine)

        self._gap = self._histogram(
            "inter_chunk_gap_seconds", "Between chunks of an answer", _SECONDS
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "From admission", _SECONDS)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Decoding time per token but the first",
            _SECONDS,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Admission to end", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a row", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From a row to the first token", _SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", _SECONDS
        )
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._outputs = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._most = self._histogram("request_params_max_tokens", "max_tokens", _TOKENS)
        self._n = self._histogram("request_params_n", "n", _FEW)
        self._lengths = self._histogram(
            "request_accept_length",
            "Tokens per verify step of an answer",
            (1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 12, 16),
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens handed to clients")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers that began")
        self._success = Counter(
            "request_success",
            "Answers by how they ended",
            ["model_name", "engine", "finished_reason"],
            registry=self._registry,
        )
        self._rejections = Counter(
            "admission_rejections",
            "Requests refused before the engine saw them",
            ["model_name", "engine", "reason"],
            registry=self._registry,
        )
        self._stages = Tallies(
            "step_stage_seconds",
            "Time that the engine's thread spends in a part of a step. On a GPU that is the time to "
            "launch it, and steps that run as graphs have no parts",
            self._labels,
            _STAGE,
            by="stage",
        )
        self._registry.register(self._stages)
        in_vain = Gauge(
            "spec_decode_in_vain",
            f"1: over the last {vain.STEPS} row-steps or more in which the drafter proposed, its accept "
            f"length stayed below {vain.LENGTH}, what grammars forced left out",
            list(self._labels),
            registry=self._registry,
        )
        in_vain.labels(**self._labels).set_function(lambda: float(self._vain.now))
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        for reason in ("queue_full", "draining", "engine_stopped"):
            self._rejections.labels(**self._labels, reason=reason)

    # -- what happens -------------------------------------------------------------------------

    def refused(self, reason: str) -> None:
        """Implement `Listener`."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def began(self, job: Job, prompt_index: int, num_tokens: int, seconds: float) -> None:
        """Implement `Listener`."""
        self._ttft.observe(seconds)
        self._prompt_tokens.value += len(job.prompts[prompt_index])
        self._generation_tokens.value += num_tokens

    def came(self, num_tokens: int, seconds: float) -> None:
        """Implement `Listener`."""
        self._gap.observe(seconds)
        self._generation_tokens.value += num_tokens

    def ended(self, result: Result, job: Job, seconds: float) -> None:
        """Implement `Listener`."""
        stats = result.stats
        sizes = stats.num_prompt_tokens, stats.num_output_tokens
        self._over(job, result.finish_reason, seconds, *sizes)
        self._queue.observe(stats.queue_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(stats.decode_s)
        if stats.num_output_tokens > 1:
            self._tpot.observe(stats.decode_s / (stats.num_output_tokens - 1))
        self._vain.saw(stats)
        if stats.num_steps:
            self._lengths.observe(stats.accept_length)

    def left(self, job: Job, prompt_index: int, num_tokens: int, seconds: float, why: str) -> None:
        """Implement `Listener`. What only the engine knows of an answer is not known of this one."""
        self._over(job, why, seconds, len(job.prompts[prompt_index]), num_tokens)

    def _over(self, job: Job, how: str, seconds: float, prompt: int, generated: int) -> None:
        """Count an answer's end: each answer that was admitted comes here once."""
        self._success.labels(**self._labels, finished_reason=how).inc()
        self._e2e.observe(seconds)
        self._prompts.observe(prompt)
        self._outputs.observe(generated)
        self._most.observe(job.params.max_tokens)
        self._n.observe(job.params.n)

    def observe_stage(self, name: str, seconds: float) -> None:
        """A part of a step took so long; for the engine's thread."""
        self._stages[name].observe(seconds)

    # -- what is read -------------------------------------------------------------------------

    def render(self, report: Mapping[str, float]) -> bytes:
        """Prometheus's text format, with the engine's counters of now."""
        self._engine.report = report
        return generate_latest(self._out)

    def _histogram(self, name: str, text: str, ends: Sequence[float]) -> Tally:
        made = Tallies(name, text, self._labels, ends)
        self._registry.register(made)
        return made[None]

    def _counter(self, name: str, text: str) -> Total:
        made = Total(name, text, self._labels)
        self._registry.register(made)
        return made
