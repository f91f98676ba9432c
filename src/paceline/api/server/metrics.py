"""Metrics: what Prometheus reads. One object per app, with a registry of its own.

What requests go through is counted here as it happens; the engine's counters are read when somebody
asks for /metrics. Names are vLLM's, under `paceline:`; a switch exports those that vLLM has under
`vllm:` too. Label `engine` is "0": one engine stands behind an app.

An answer's *gap* is the time between two of its chunks, each of which may hold several tokens: use
`request_time_per_output_token_seconds` to compare with engines that send token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from paceline.api.results import Chunk, Result
    from paceline.api.server.job import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_SPEC = "spec_decode_num_"
_VAIN_DRAFTS = 256  # row-steps over which a drafter is judged
_VAIN_LENGTH = 1.05  # an accept length below this pays for no draft

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
_SECONDS = (*_SHORT, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_STAGE = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.128, 0.256, 0.5, 1)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_FEW = (1, 2, 5, 10, 20, 50, 128)

# Our name -> vLLM's, for `vllm:`.
_VLLM: Mapping[str, str] = {
    "inter_chunk_gap_seconds": "inter_token_latency_seconds",
    **{
        name: name
        for name in (
            "admission_rejections",
            "cache_config_info",
            "e2e_request_latency_seconds",
            "generation_tokens",
            "kv_cache_usage_perc",
            "num_preemptions",
            "num_requests_running",
            "num_requests_waiting",
            "prefix_cache_hits",
            "prefix_cache_queries",
            "prompt_tokens",
            "request_decode_time_seconds",
            "request_generation_tokens",
            "request_params_max_tokens",
            "request_params_n",
            "request_prefill_time_seconds",
            "request_prompt_tokens",
            "request_queue_time_seconds",
            "request_success",
            "request_time_per_output_token_seconds",
            "spec_decode_num_accepted_tokens",
            PER_POSITION,
            "spec_decode_num_draft_tokens",
            "spec_decode_num_drafts",
            "time_to_first_token_seconds",
        )
    },
}
# Key of `Engine.report` -> (name here, what it counts).
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_preemptions": ("num_preemptions", "Rows whose pages were taken away for others"),
    "num_extend_steps": ("extend_steps", "Steps that computed prompts"),
    "num_block_steps": ("block_steps", "Steps that verified and decoded"),
    "num_prefill_tokens": ("prefill_tokens", "Prompt tokens computed; cached ones are not"),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Row-steps with at least one draft node"),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Draft nodes verified"),
    "spec_decode_num_accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Draft nodes whose token was emitted",
    ),
}
_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_running": ("num_requests_running", "Requests that hold a row"),
    "num_waiting": ("num_requests_waiting", "Requests that the engine has no row for"),
    "kv_cache_usage": ("kv_cache_usage_perc", "KV pages in use, of 1; cached ones are free"),
}


class Metrics:
    """Counts for one app; a `Listener` of its service, and of the engine's stages (`observe_stage`).

    Args:
        model: label `model_name`.
        num_positions: depths of draft trees, which are told from the beginning.
        vllm_names: export under `vllm:` too.
    """

    def __init__(self, model: str, *, num_positions: int = 0, vllm_names: bool = False) -> None:
        self._num_positions = num_positions
        self._labels = {"model_name": model, "engine": "0"}
        self._report: Mapping[str, float] = {}
        self._vain = _Vain()
        self._registry = CollectorRegistry()
        self._out = CollectorRegistry()
        self._out.register(_Renamed(self._registry, "paceline:", None))
        if vllm_names:
            self._out.register(_Renamed(self._registry, "vllm:", _VLLM))
        ProcessCollector(registry=self._out)
        self._registry.register(_OfEngine(self))

        self._ttft = self._histogram("time_to_first_token_seconds", "From admission", _SECONDS)
        self._gap = self._histogram(
            "inter_chunk_gap_seconds", "Between chunks of an answer", _SECONDS
        )
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
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answers that began")
        self._generation_tokens = self._counter("generation_tokens", "Tokens handed to clients")
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
        self._stages = Histogram(
            "step_stage_seconds",
            "Time that the engine's thread spends in a part of a step. On a GPU that is the time to "
            "launch it, and steps that run as graphs have no parts",
            ["model_name", "engine", "stage"],
            buckets=_STAGE,
            registry=self._registry,
        )
        self._parts: dict[str, Histogram] = {}
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        for reason in ("queue_full", "draining", "engine_stopped"):
            self._rejections.labels(**self._labels, reason=reason)

    # -- what happens -------------------------------------------------------------------------

    def refused(self, reason: str) -> None:
        """Implement `Listener`."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def came(self, chunk: Chunk, job: Job, seconds: float, *, first: bool) -> None:
        """Implement `Listener`."""
        self._generation_tokens.inc(len(chunk.token_ids))
        if first:
            self._ttft.observe(seconds)
            self._prompt_tokens.inc(len(job.prompts[chunk.prompt_index]))
        else:
            self._gap.observe(seconds)

    def ended(self, result: Result, job: Job, seconds: float) -> None:
        """Implement `Listener`."""
        stats = result.stats
        self._success.labels(**self._labels, finished_reason=result.finish_reason).inc()
        self._e2e.observe(seconds)
        self._queue.observe(stats.queue_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(stats.decode_s)
        self._prompts.observe(stats.num_prompt_tokens)
        self._outputs.observe(stats.num_output_tokens)
        self._most.observe(job.params.max_tokens)
        self._n.observe(job.params.n)
        if stats.num_output_tokens > 1:
            self._tpot.observe(stats.decode_s / (stats.num_output_tokens - 1))
        if stats.num_steps:
            self._lengths.observe(stats.accept_length)

    def observe_stage(self, name: str, seconds: float) -> None:
        """A part of a step took so long; for the engine's thread."""
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self._stages.labels(**self._labels, stage=name)
        part.observe(seconds)

    # -- what is read -------------------------------------------------------------------------

    def render(self, report: Mapping[str, float]) -> bytes:
        """Prometheus's text format, with the engine's counters of now."""
        self._report = report
        self._vain.saw(report)
        return generate_latest(self._out)

    def of_engine(self) -> Iterable[Metric]:
        """Metrics made of the engine's last report."""
        names, values = list(self._labels), list(self._labels.values())
        report = self._report
        for key, (name, text) in _COUNTERS.items():
            if key in report:
                counter = CounterMetricFamily(name, text, labels=names)
                counter.add_metric(values, report[key])
                yield counter
        for key, (name, text) in _GAUGES.items():
            if key in report:
                gauge = GaugeMetricFamily(name, text, labels=names)
                gauge.add_metric(values, report[key])
                yield gauge
        places = CounterMetricFamily(
            PER_POSITION,
            "Drafts accepted at a depth of their tree, from 0",
            labels=[*names, "position"],
        )
        counts = {**dict.fromkeys(range(self._num_positions), 0.0), **accepted_per_position(report)}
        for position, count in counts.items():
            places.add_metric([*values, str(position)], count)
        yield places
        if "kv_pages" in report:
            info = GaugeMetricFamily(
                "cache_config_info",
                "Size of the KV pool",
                labels=[*names, "block_size", "num_gpu_blocks"],
            )
            sizes = [f"{report['kv_page_size']:.0f}", f"{report['kv_pages']:.0f}"]
            info.add_metric([*values, *sizes], 1)
            yield info
        vain = GaugeMetricFamily(
            "spec_decode_in_vain",
            f"1: over the last {_VAIN_DRAFTS} row-steps or more with drafts the accept length stayed "
            f"below {_VAIN_LENGTH}",
            labels=names,
        )
        vain.add_metric(values, float(self._vain.now))
        yield vain

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, list(self._labels), buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self._registry).labels(
            **self._labels
        )


def accepted_per_position(report: Mapping[str, float]) -> dict[int, float]:
    """Depth -> drafts accepted there, from an engine's report."""
    start = f"{PER_POSITION}_"
    return {int(k.removeprefix(start)): v for k, v in report.items() if k.startswith(start)}


def accept_length(report: Mapping[str, float]) -> float | None:
    """Tokens per row-step that had drafts, the bonus token included; None: there was none."""
    drafts = report.get(f"{_SPEC}drafts", 0.0)
    return 1.0 + report[f"{_SPEC}accepted_tokens"] / drafts if drafts else None


class _Vain:
    """Whether drafts are made in vain, by windows of many row-steps."""

    def __init__(self) -> None:
        self.now = False
        self._drafts = self._accepted = 0.0  # at the window's beginning

    def saw(self, report: Mapping[str, float]) -> None:
        drafts = report.get(f"{_SPEC}drafts", 0.0)
        accepted = report.get(f"{_SPEC}accepted_tokens", 0.0)
        new = drafts - self._drafts
        if new >= _VAIN_DRAFTS:
            self.now = 1.0 + (accepted - self._accepted) / new < _VAIN_LENGTH
            self._drafts, self._accepted = drafts, accepted


class _OfEngine(Collector):
    """What the engine counts itself."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Implement `Collector`."""
        return self._metrics.of_engine()


class _Renamed(Collector):
    """Another registry's metrics under a prefix; without the times at which each was made.

    Args:
        source: the registry.
        prefix: before each name.
        names: old name -> new; others are left out. None: all, as they are.
    """

    def __init__(
        self, source: CollectorRegistry, prefix: str, names: Mapping[str, str] | None
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._names = names

    def collect(self) -> Iterable[Metric]:
        """Implement `Collector`."""
        for metric in self._source.collect():
            name = metric.name if self._names is None else self._names.get(metric.name)
            if name is None:
                continue
            renamed = Metric(self._prefix + name, metric.documentation, metric.type)
            renamed.samples = [
                Sample(self._prefix + name + s.name.removeprefix(metric.name), s.labels, s.value)
                for s in metric.samples
                if not s.name.endswith("_created")
            ]
            yield renamed

    def describe(self) -> Iterable[Metric]:
        """Names are known when they are collected."""
        return ()
