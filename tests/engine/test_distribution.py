"""The law of what a whole engine emits, with trees drafted from past outputs, and a control."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import models
from paceline.core.request import SamplingParams
from paceline.core.tree import DraftTree, Selection, Verdict
from paceline.engine.step import Walk
from paceline.ops.reference.tree import parents_of
from paceline.sample.verifier import verify
from tests import tiny
from tests.dense import logits
from tests.engine.harness import engine, request, run
from tests.oracle.goodness import chi2

V, LENGTH, NUM = 8, 3, 1600
PROMPT = [3, 4, 5, 3, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of eight tokens, so that every three of them can be counted."""
    return tiny.write_tiny(tmp_path_factory.mktemp("eight"), "llama", seed=3, vocab_size=V)


@pytest.fixture(scope="module")
def law(model: Path) -> dict[object, float]:
    """The target's joint law of the first tokens by the chain rule, from dense attention."""
    cpu, files = torch.device("cpu"), models.resolve(str(model))
    net = models.load(files, device=cpu, dtype=torch.float64, weights="bf16").net

    @functools.cache
    def after(text: tuple[int, ...]) -> list[float]:
        return torch.softmax(logits(net, [*PROMPT, *text])[-1], 0).tolist()

    found: dict[object, float] = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        p = 1.0
        for i, token in enumerate(text):
            p *= after(text[:i])[token]
        found[text] = p
    return found


def emitted(model: Path, walk: Walk = verify) -> tuple[list[object], dict[str, float]]:
    """The first tokens of many requests that differ in their seeds only, and the counters.

    `walk` is how far the target's tokens go along the trees.
    """
    eng = engine(
        model,
        method="suffix",
        suffix_max_spec_factor=8.0,
        suffix_min_token_prob=0.0,
        max_rows=8,
        max_len=32,
    )
    eng._launcher._walk = walk
    params = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    done = run(
        eng,
        [request(str(i), PROMPT, SamplingParams(**params, seed=i)) for i in range(NUM)],
    )
    return [tuple(d.tokens) for d in done.values()], eng.report()


def test_emitted_tokens_have_the_targets_law(model: Path, law: dict[object, float]) -> None:
    """From prompt to token, through pages, trees and batches: the target's law at temperature 1."""
    tokens, report = emitted(model)
    assert report["spec_decode_num_accepted_tokens"] > NUM / 4, "hardly anything was drafted"
    assert abs(chi2(tokens, law, NUM)) < 5


def favouring(
    tree: DraftTree, selection: Selection, hidden: Tensor, head: Callable[[Tensor], Tensor], *rest
) -> Verdict:
    """A biased rule: a first child gets two more logits, as if the drafter were to be believed."""
    parents = parents_of(tree, selection)
    tokens = tree.token_ids.view(-1)[selection.node.clamp(min=0)]
    bonus = torch.zeros(hidden.shape[0], V, dtype=hidden.dtype)
    for child in range(hidden.shape[0]):
        parent = int(parents[child])
        if parent >= 0 and not bonus[parent].any():
            bonus[parent, tokens[child]] = 2.0
    return verify(tree, selection, hidden, lambda h: head(h) + bonus, *rest)


def test_the_same_test_rejects_a_rule_that_favours_drafts(
    model: Path, law: dict[object, float]
) -> None:
    """The engine with one wrong line fails the test above by far."""
    tokens, _ = emitted(model, favouring)
    assert chi2(tokens, law, NUM) > 20
