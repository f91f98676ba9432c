"""EAGLE-3 in the engine, layout by layout: what each pass over the paged cache finds is the definition's.

A random drafter is enough: its proposals are nonsense, but every candidate's score can be compared with
a dense computation from the formulas (`tests/oracle/eagle3.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.request import Request, SamplingParams
from paceline.core.tree import DraftTree
from paceline.engine.engine import Engine
from tests import tiny, tiny_eagle3
from tests.dense import features_of
from tests.engine.harness import Outcome, engine, request, run
from tests.oracle import eagle3 as oracle

PROMPTS = [
    [11, 12, 13, 14, 15] * 4,
    [31, 7, 96, 7, 9, 31, 96],  # with ids that cannot be drafted
    [5],
    [(3 * i) % 23 + 3 for i in range(33)],
]
TREE = {"eagle_topk": 3, "eagle_num_steps": 4}
# How a drafter is written, and how it drafts.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chain": ({}, {}),
    "chain of one": ({}, {"num_speculative_tokens": 1}),
    "tree": ({}, TREE),
    "tree, wide": ({}, {"eagle_topk": 22, "eagle_num_steps": 5, "num_speculative_tokens": 70}),
    "tree, one level": ({}, {"eagle_topk": 5, "eagle_num_steps": 1}),
    "a norm for each tap, normed output": ({"fc_norm": True, "norm_output": True}, TREE),
    "a norm for all taps": ({"norm_before_fc": True}, {}),
    "normed residual": ({"norm_before_residual": True}, TREE),
    "biases": ({"qkv_bias": True, "logit_scale": 0.4}, {}),
    "whole vocabulary": ({"draft_vocab_size": 97}, TREE),
    "small vocabulary": ({"draft_vocab_size": 2}, TREE),
    "narrow": ({"hidden_size": 48, "target_hidden_size": 64}, TREE),
    "other taps": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 0]}}, {}),
    "other rotation": ({"rope_theta": 500.0, "max_position_embeddings": 16}, TREE),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=3)


Round = tuple[Sequence[Request], dict[str, Outcome]]


@pytest.fixture(scope="module")
def rounds(model: Path) -> list[Round]:
    """Batches that every layout serves one after the other, and their autoregressive answers."""
    plain = engine(model, method="none")
    made: list[Round] = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=18, ignore_eos=True, temperature=temperature, seed=4)
        jobs = [request(f"{i}/{temperature}", p, params) for i, p in enumerate(PROMPTS)]
        made.append((jobs, run(plain, jobs)))
    return made


class Definition:
    """Compares what an engine's drafter found with the dense definition, in some of its steps."""

    def __init__(self, eng: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._eng = eng
        self._config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        self._tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self.drafter: Any = eng._proposer._drafter
        self._target = eng._launcher._target.net
        own = self._tensors.get("embed_tokens.weight")
        vocab = torch.arange(self._config["vocab_size"])
        self._embedding = self._target.embed(vocab) if own is None else own
        self.compared = self._calls = 0
        real = self.drafter.propose

        def spy(rows: Tensor) -> DraftTree:
            tree: DraftTree = real(rows)
            tree.check()
            self._calls += 1
            if self._calls % 6 == 1:
                for b, row in enumerate(rows.tolist()):
                    if self._has_room(row):
                        self._compare(b, row)
            return tree

        monkeypatch.setattr(self.drafter, "propose", spy)

    def _sequence(self, row: int) -> Any:
        (sequence,) = (s for s in self._eng._scheduler.running if s.row == row)
        return sequence

    def _has_room(self, row: int) -> bool:
        """Whether the draft's keys have pages; a row without them has no budget."""
        sequence = self._sequence(row)
        needed = len(sequence.tokens) - 1 + self.drafter.spec.scratch
        return bool(4 * len(sequence.pages) >= needed)

    def _compare(self, b: int, row: int) -> None:
        text = self._sequence(row).tokens
        taps = features_of(self._target, text[:-1], self.drafter.net.config.aux_layers)
        asked = self.drafter._asked
        temperature = float(asked.temperature[b])
        for depth, found in enumerate(asked.found):
            for node in range(found.ids.shape[1]):
                path = self._path(b, depth, node)
                if path is None:  # no such node: nothing more could be drafted
                    continue
                output = oracle.after_path(
                    self._tensors, self._config, self._embedding, text, taps, path
                )
                logits = oracle.logits(self._tensors, self._config, output[None])[0]
                y = logits / temperature if temperature else logits
                ids = found.ids[b, node]
                d2t = self._tensors["d2t"] + torch.arange(len(y))
                at = (d2t[:, None] == ids).to(torch.int64).argmax(0)
                torch.testing.assert_close(y[at].sort().values, y.sort().values[-len(at) :])
                noise = self.drafter._runtime.noise(
                    torch.tensor([row]), torch.tensor([len(text) + depth]), ids[None]
                )[0]
                torch.testing.assert_close(
                    found.scores[b, node], y[at] + noise, rtol=1e-7, atol=1e-7
                )
                self.compared += 1

    def _path(self, b: int, depth: int, node: int) -> list[int] | None:
        tokens: list[int] = []
        for level in reversed(self.drafter._asked.levels[1 : depth + 1]):
            if float(level.scores[b, node]) == -torch.inf:
                return None
            tokens.append(int(level.tokens[b, node]))
            node = int(level.parents[b, node])
        return tokens[::-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(
    model: Path,
    rounds: Sequence[Round],
    tmp_path: Path,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every candidate's score equals the dense definition's with the target's noise, in a batch of
    mixed lengths, with chunks, prefix hits and preemption; tokens equal autoregressive ones.
    """
    written, drafting = LAYOUTS[layout]
    folder = tiny_eagle3.write_eagle3(tmp_path, model, **written)
    pages = 80 if "wide" in layout else 26
    size = {"max_len": 72, "chunk_size": 7, "num_pages": pages}
    eng = engine(model, method="eagle3", model=str(folder), **{**size, **drafting})
    watch = Definition(eng, folder, monkeypatch)
    for jobs, expected in rounds:
        for name, outcome in run(eng, jobs).items():
            assert outcome.tokens == expected[name].tokens, name
    assert watch.compared > 10
