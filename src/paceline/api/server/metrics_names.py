"""Names under which metrics go out: ours with `paceline:` before them, and vLLM's under `vllm:`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Our name -> vLLM's, for `vllm:`.
VLLM: Mapping[str, str] = {
    "inter_chunk_gap_seconds": "inter_token_latency_seconds",
    **{
        name: name
        for name in (
            "admission_rejections",
            "cache_config_info",
            "e2e_request_latency_seconds",
            "generation_tokens",
            "iteration_tokens_total",
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
            "spec_decode_num_accepted_tokens_per_pos",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_drafts",
            "time_to_first_token_seconds",
        )
    },
}


class Renamed(Collector):
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
