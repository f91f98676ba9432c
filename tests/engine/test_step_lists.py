"""What a request is told of each of its steps adds up to its sums, and those to the engine's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.request import SamplingParams
from paceline.core.tree import FORCED
from paceline.engine.engine import Engine
from tests import grammars, tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import Outcome, engine, run
from tests.tiny_drafters import write_dflash

# Its tokens go on in different ways, so that trees have branches.
PROMPT = [11, 12, 13, 11, 12, 14, 11, 12, 15, 11, 12, 13, 16, 11, 12]
CASES = [
    (method, pattern)
    for method in ("none", "ngram", "suffix", "ddtree")
    for pattern in (None, "form", "list")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=2)


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network for it: most of its nodes are rejected."""
    return write_dflash(tmp_path_factory.mktemp("drafter"), model)


def built(model: Path, drafter: Path, method: str, **options: object) -> Engine:
    network = {"model": str(drafter)} if method == "ddtree" else {}
    return engine(model, method=method, **network, **options)


def answers(
    eng: Engine, pattern: str | None, *, lists: bool = True, trees: bool = False
) -> dict[str, Outcome]:
    """Two answers at once, one of them as the pattern has it, the other free."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=30, ignore_eos=pattern is None)
    asked = [
        grammars.constrained(key, PROMPT, params, rule, lists_steps=lists, shows_trees=trees)
        for key, rule in (("ruled", pattern), ("free", None))
    ]
    return run(eng, asked)


@pytest.mark.parametrize("method, pattern", CASES)
def test_steps_add_up(model: Path, drafter: Path, method: str, pattern: str | None) -> None:
    """To the totals, to the histogram, and step by step to the trees that were verified."""
    for outcome in answers(built(model, drafter, method), pattern, trees=True).values():
        stats = outcome.last.stats
        assert stats is not None
        drafted, accepted = stats.drafted_per_step, stats.accepted_per_step
        assert len(drafted) == len(accepted) == stats.num_steps > 0
        assert (sum(drafted), sum(accepted)) == (stats.num_drafted, stats.num_accepted)
        counts = [accepted.count(j) for j in range(len(stats.accept_histogram))]
        assert counts == list(stats.accept_histogram)
        assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
        assert stats.num_drafts == sum(d > 0 for d in drafted)

        trees = [out.tree for out in outcome.outputs[1:]]
        nodes = [0 if tree is None else len(tree.token_ids) - 1 for tree in trees]
        assert list(drafted) == nodes
        whole = zip(accepted[:-1], trees[:-1], strict=True)  # the last one may be cut at a stop
        assert all(a == (0 if tree is None else len(tree.path) - 1) for a, tree in whole)
        own = [tree for tree in trees if tree is not None and set(tree.sources[1:]) - {FORCED}]
        assert stats.num_drafter_steps == len(own) <= stats.num_drafts
        if method == "none":
            assert stats.num_drafter_steps == 0
            assert stats.num_forced == stats.num_accepted


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("method, pattern", CASES)
def test_answers_add_up_to_the_counters(
    model: Path, drafter: Path, method: str, pattern: str | None, gpu: bool
) -> None:
    """So that 1 + accepted / steps is what the answers' accept lengths are, weighted by their steps."""
    eng = built(model, drafter, method)
    if gpu:
        as_on_gpu(eng)
    stats = [out.last.stats for out in answers(eng, pattern).values()]
    report = eng.report()

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in stats)

    for name, counter in (
        ("num_steps", "spec_decode_num_steps"),
        ("num_drafts", "spec_decode_num_drafts"),
        ("num_drafted", "spec_decode_num_draft_tokens"),
        ("num_accepted", "spec_decode_num_accepted_tokens"),
        ("num_forced", "spec_decode_num_forced_tokens"),
    ):
        assert total(name) == report[counter], name
    length = 1 + report["spec_decode_num_accepted_tokens"] / report["spec_decode_num_steps"]
    weighted = sum(one.accept_length * one.num_steps for one in stats) / total("num_steps")
    assert length == pytest.approx(weighted)
    for one in stats:
        assert sum(one.drafted_per_step) == one.num_drafted
        assert sum(one.accepted_per_step) == one.num_accepted

    passes = sum(v for k, v in report.items() if k.startswith("iteration_tokens_le_"))
    assert passes == report["num_extend_steps"] + report["num_block_steps"]
    emitted = total("num_output_tokens")
    assert report["iteration_tokens_sum"] == report["num_prefill_tokens"] + emitted


def test_who_does_not_ask_is_told_sums_alone(model: Path, drafter: Path) -> None:
    """The lists would grow with the answer."""
    told = answers(built(model, drafter, "suffix"), None)["free"].last.stats
    plain = answers(built(model, drafter, "suffix"), None, lists=False)["free"].last.stats
    assert plain.drafted_per_step == plain.accepted_per_step == ()
    assert (plain.num_drafted, plain.accept_histogram) == (told.num_drafted, told.accept_histogram)
