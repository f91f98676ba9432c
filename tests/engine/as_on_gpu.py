"""Makes engines on a CPU do as on a GPU, but for the device; no tests here.

There a network's trees are grown inside the step and nobody reads them, whole steps are replayed over
padded rows and fixed places, and results come one step late. Here the same code runs: what a graph would
replay is called again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.graphs import GraphCache, Recorded, Recorder, Step
from paceline.engine.growers import Grower, MergedGrower, NetworkGrower
from paceline.engine.launch import graphs_of
from paceline.engine.step_tensors import StepTensors
from tests.engine.harness import request, run


@dataclass(frozen=True)
class Called:
    """A step that is simply taken again."""

    step: Step
    nbytes: int = 0

    def replay(self) -> StepTensors:
        """See `Recorded`."""
        return self.step()


class Calls:
    """A `Recorder` that captures nothing; like a capture it runs the step over padding first."""

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        step()
        return Called(step)


def grower_of(proposer: Any, num_rows: int) -> Grower:
    """What the proposer of a network, alone or merged, grows trees by on a GPU."""
    if not hasattr(proposer, "_parts"):
        return NetworkGrower(proposer._drafter)
    network = next(part for part in proposer._parts if part.observes)
    hosts = [part for part in proposer._parts if part is not network]
    network.grower, device = NetworkGrower(network._drafter), torch.device("cpu")
    return MergedGrower(
        proposer._merged, proposer.spec, hosts, network, proposer._wanted, num_rows, device
    )


def as_on_gpu(eng: Engine, recorder: Recorder | None = None) -> GraphCache:
    """Steps over padded rows, one step behind where the drafter allows it."""
    parts = eng._parts
    if not parts.proposer.spec.on_host:
        parts.proposer.grower = grower_of(parts.proposer, parts.config.cache.max_rows)
    eng.lag = 0 if parts.proposer.needs_text and eng._max_draft else 1
    graphs = graphs_of(parts, recorder or Calls())
    eng._launcher.graphs = graphs
    return graphs


def greedy(eng: Engine, prompts: list[list[int]], tokens: int = 24) -> dict[str, list[int]]:
    """Greedy answers to prompts, all at once."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    done = run(eng, [request(str(i), p, params) for i, p in enumerate(prompts)])
    return {name: outcome.tokens for name, outcome in done.items()}
