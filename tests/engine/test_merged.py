"""Several drafters in one engine: more is accepted than by the better part, and devices are fed in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams
from paceline.core.tree import DraftTree, Proposal, root
from paceline.draft.base import Commit, DrafterSpec, HostCommit
from paceline.draft.merged import Merged
from paceline.engine.proposers import MergedProposer
from paceline.engine.sequence import Sequence as Row
from tests import tiny
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import overfit_dflash

# The first answer is what the network was trained on; the second repeats its prompt's own loop.
KNOWN = [(7 * i * i + 3 * i) % 23 + 3 for i in range(20)]
LOOP = [11, 12, 13, 14, 15] * 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=1)


def steps(target: Path, **options: Any) -> int:
    """Verify steps that two answers take, one after the other."""
    eng = engine(target, **options)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    for name, prompt in (("known", KNOWN), ("loop", LOOP)):
        run(eng, [request(name, prompt, params)])
    return int(eng.report()["num_block_steps"])


def test_merged_accepts_as_much_as_the_better_part(target: Path, tmp_path: Path) -> None:
    """At one node budget, on a text that the network knows and one that repeats itself."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain = engine(target, method="none")
    answer = run(plain, [request("known", KNOWN, params)])["known"].tokens
    folder = overfit_dflash(tmp_path / "drafter", target, [[*KNOWN, *answer]], steps=120)
    network = {"model": str(folder)}
    suffix = steps(target, method="suffix")
    ddtree = steps(target, method="ddtree", **network)
    merged = steps(target, method="merged", parts=("suffix", "ddtree"), **network)
    assert merged <= min(suffix, ddtree), (merged, suffix, ddtree)


def test_two_networks_are_refused(target: Path) -> None:
    """Said when the engine is built, with what is possible."""
    with pytest.raises(ConfigError, match="dflash and eagle3 are networks"):
        engine(target, method="merged", parts=("dflash", "eagle3"))


class Part:
    """A proposer that notes when it is asked, on a device without values."""

    def __init__(self, name: str, log: list[str], *, on_host: bool) -> None:
        self.spec = DrafterSpec(name=name, max_nodes=5, max_depth=4, on_host=on_host)
        self.observes = self.needs_text = not on_host
        self.grower = None if on_host else self
        self._log = log

    def propose(
        self, rows: Sequence[int], row_ids: Tensor, budgets: Sequence[int]
    ) -> list[Proposal]:
        del row_ids, budgets
        self._log.append(f"{self.spec.name} proposes")
        return [
            Proposal(tokens=[3, 4], parents=[-1, 0], scores=[-0.1, -0.2], sources=[1, 1])
        ] * len(rows)

    def stage(self, rows: Sequence[int], budgets: Sequence[int]) -> None:
        del rows, budgets
        self._log.append(f"{self.spec.name} stages")

    def grow(self, row_ids: Tensor) -> DraftTree:
        self._log.append(f"{self.spec.name} grows")
        return root(row_ids)

    def join(self, sequence: Row) -> None:
        self._log.append(f"{self.spec.name} joins")

    def leave(self, sequence: Row, *, finished: bool) -> None:
        self._log.append(f"{self.spec.name} leaves")

    def observe(self, commit: Commit) -> None:
        self._log.append(f"{self.spec.name} observes")

    def tell(self, commit: HostCommit) -> None:
        self._log.append(f"{self.spec.name} is told")


def test_on_a_device_lists_go_there_before_the_network_is_asked() -> None:
    """In tensors whose shape depends on no list; nothing is read back (meta tensors hold nothing)."""
    log: list[str] = []
    parts = [Part("network", log, on_host=False), Part("suffix", log, on_host=True)]
    merged = Merged(DraftConfig(method="merged", num_speculative_tokens=6))
    meta = torch.device("meta")
    grower = MergedProposer(merged, parts, 4, meta).grower
    assert grower is not None
    grower.stage([0, 1, 2], [6, 6, 6])
    assert log == ["suffix proposes", "network stages"]
    tree = grower.grow(torch.zeros(3, dtype=torch.int64, device=meta))
    assert log[2:] == ["network grows"]
    assert tree.token_ids.device.type == "meta"
    assert tree.token_ids.shape == (3, 5)  # of a list of two nodes, padded to its promise


def test_every_part_learns() -> None:
    """Told, joined and left by all; what a pass made final goes to those who watch."""
    log: list[str] = []
    parts = [Part("suffix", log, on_host=True), Part("network", log, on_host=False)]
    whole = Merged(DraftConfig(method="merged"))
    proposer = MergedProposer(whole, parts, 4, torch.device("cpu"))
    assert proposer.observes
    nothing: Any = None
    sequence: Any = SimpleNamespace(row=0, request=request("a", [3], SamplingParams()))
    proposer.join(sequence)
    proposer.observe(nothing)
    proposer.tell(HostCommit(rows=[], tokens=[]))
    proposer.leave(sequence, finished=True)
    assert log == [
        *("suffix joins", "network joins", "network observes"),
        *("suffix is told", "network is told", "suffix leaves", "network leaves"),
    ]
