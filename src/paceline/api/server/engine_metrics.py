"""Metrics made of what an engine reports of itself (`Engine.report`), at the moment when somebody asks.

Row-steps: one verify of one row. Three identities hold between an engine's counters and what the
answers say that it has finished (`metrics.speculative_decoding`; those that were left are counted here
alone):

    spec_decode_num_steps  = sum of num_spec_steps     1 + accepted / steps  = mean_acceptance_length
    spec_decode_num_drafts = sum of num_drafts         1 + accepted / drafts = the same, where drafts were
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_BUCKET = "iteration_tokens_le_"
# Key of `Engine.report` -> (name here, what it counts).
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "num_preemptions": ("num_preemptions", "Rows whose pages were taken away for others"),
    "num_extend_steps": ("extend_steps", "Steps that computed prompts"),
    "num_block_steps": ("block_steps", "Steps that verified and decoded"),
    "num_prefill_tokens": ("prefill_tokens", "Prompt tokens computed; cached ones are not"),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "spec_decode_num_steps": (
        "spec_decode_num_steps",
        "Row-steps that verified, with drafts or without",
    ),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Row-steps with at least one draft node"),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Draft nodes verified"),
    "spec_decode_num_accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Draft nodes that the target took",
    ),
    "spec_decode_num_forced_tokens": (
        "spec_decode_num_forced_tokens",
        "Of the accepted ones, those that a grammar forced: they come without a drafter",
    ),
    "num_steps_without_graph": (
        "num_steps_without_graph",
        "Of the block steps, those that no CUDA graph served, which are slower; 0 where graphs are off",
    ),
}
_GAUGES: Mapping[str, tuple[str, str]] = {
    "num_running": ("num_requests_running", "Requests that hold a row"),
    "num_waiting": ("num_requests_waiting", "Requests that the engine has no row for"),
    "kv_cache_usage": ("kv_cache_usage_perc", "KV pages in use, of 1; cached ones are free"),
    "num_graphs": ("num_graphs", "CUDA graphs captured so far"),
    "graph_bytes": ("graph_bytes", "Memory of the device that CUDA graphs hold"),
}


class EngineMetrics(Collector):
    """What the engine counts itself.

    Args:
        labels: of every sample.
        num_positions: depths of draft trees, which are told from the beginning.
    """

    def __init__(self, labels: Mapping[str, str], num_positions: int) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self._num_positions = num_positions
        self.report: Mapping[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        """Implement `Collector`."""
        report, values = self.report, self._values
        for key, (name, text) in _COUNTERS.items():
            if key in report:
                counter = CounterMetricFamily(name, text, labels=self._names)
                counter.add_metric(values, report[key])
                yield counter
        for key, (name, text) in _GAUGES.items():
            if key in report:
                gauge = GaugeMetricFamily(name, text, labels=self._names)
                gauge.add_metric(values, report[key])
                yield gauge
        places = CounterMetricFamily(
            PER_POSITION,
            "Drafts accepted at a depth of their tree, from 0",
            labels=[*self._names, "position"],
        )
        counts = {**dict.fromkeys(range(self._num_positions), 0.0), **accepted_per_position(report)}
        for position, count in counts.items():
            places.add_metric([*values, str(position)], count)
        yield places
        if buckets := _buckets(report):
            passes = HistogramMetricFamily(
                "iteration_tokens_total",
                "Tokens per step: prompt tokens computed and tokens emitted",
                labels=self._names,
            )
            passes.add_metric(values, buckets, report["iteration_tokens_sum"])
            yield passes
        if "kv_pages" in report:
            info = GaugeMetricFamily(
                "cache_config_info",
                "Size of the KV pool",
                labels=[*self._names, "block_size", "num_gpu_blocks"],
            )
            sizes = [f"{report['kv_page_size']:.0f}", f"{report['kv_pages']:.0f}"]
            info.add_metric([*values, *sizes], 1)
            yield info


def _buckets(report: Mapping[str, float]) -> Sequence[tuple[str, float]]:
    """Upper end and number of steps up to it, ascending; the report has those between two ends."""
    found: list[tuple[str, float]] = []
    total = 0.0
    for key, count in report.items():
        if key.startswith(_BUCKET):
            total += count
            end = key.removeprefix(_BUCKET)
            found.append(("+Inf" if end == "inf" else f"{float(end)}", total))
    return found


def accepted_per_position(report: Mapping[str, float]) -> dict[int, float]:
    """Depth -> drafts accepted there, from an engine's report."""
    start = f"{PER_POSITION}_"
    return {int(k.removeprefix(start)): v for k, v in report.items() if k.startswith(start)}


def accept_length(report: Mapping[str, float]) -> float | None:
    """Tokens per row-step, the bonus token included, as answers have it; None: there was none."""
    steps = report.get("spec_decode_num_steps", 0.0)
    return 1.0 + report["spec_decode_num_accepted_tokens"] / steps if steps else None
