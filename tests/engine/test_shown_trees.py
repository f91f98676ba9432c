"""Trees that a request shows: they spell what was emitted, cost others nothing and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.request import FinishReason, SamplingParams, StepOutput, VerifiedTree
from paceline.engine.engine import Engine
from tests import tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import write_dflash

# A prompt in which the same tokens go on in different ways, so that trees have branches.
PROMPT = [11, 12, 13, 11, 12, 14, 11, 12, 15, 11, 12, 13, 16, 11, 12]
METHODS = ["none", "ngram", "suffix", "ddtree"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=2)


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained network for it: most of its nodes are rejected."""
    return write_dflash(tmp_path_factory.mktemp("drafter"), model)


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **values})


def outputs(eng: Engine, given: SamplingParams, *, shows_trees: bool = True) -> list[StepOutput]:
    found = run(eng, [request("a", PROMPT, given, shows_trees=shows_trees)])
    return found["a"].outputs


def built(model: Path, drafter: Path, method: str) -> Engine:
    network = {"model": str(drafter)} if method == "ddtree" else {}
    return engine(model, method=method, **network)


def spelled(tree: VerifiedTree) -> list[int]:
    return [tree.token_ids[node] for node in tree.path[1:]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_path_spells_what_was_emitted(
    model: Path, drafter: Path, method: str, temperature: float
) -> None:
    """The page shows the tree that was verified, not one that looks like it."""
    found = outputs(built(model, drafter, method), params(temperature=temperature, seed=3))
    assert found[0].tree is None, "the first token comes from the prompt's pass"
    emitted = list(found[0].token_ids)
    histogram = [0] * len(found[-1].stats.accept_histogram)
    drafted = 0
    for out in found[1:]:
        tree = out.tree
        assert tree is not None
        assert tree.start == len(emitted)
        assert list(tree.emitted) == list(out.token_ids)
        assert tree.token_ids[0] == emitted[-1], "the root is the newest token before the step"
        own = list(out.token_ids[len(tree.path) - 1 :])
        assert spelled(tree) + own == list(out.token_ids)
        assert len(own) == 1 or out.finish_reason is not None
        assert [tree.parents[b] for b in tree.path[1:]] == list(tree.path[:-1])
        assert [tree.sources[b] for b in tree.path[1:]] == list(out.sources[: len(tree.path) - 1])
        sizes = {len(x) for x in (tree.token_ids, tree.parents, tree.sources, tree.scores)}
        assert len(sizes) == 1
        assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
        drafted += len(tree.token_ids) - 1
        if out.finish_reason is None:
            histogram[len(tree.path) - 1] += 1
        emitted += out.token_ids
    stats = found[-1].stats
    assert drafted == stats.num_drafted
    assert sum(abs(a - b) for a, b in zip(histogram, stats.accept_histogram, strict=True)) <= 1
    if method != "none" and not temperature:  # at 0.8 an n-gram may find nothing
        assert drafted > 0


def test_a_tree_has_rejected_branches(model: Path, drafter: Path) -> None:
    """Rejected nodes are half of what there is to see."""
    trees = [out.tree for out in outputs(built(model, drafter, "ddtree"), params()) if out.tree]
    forks = [tree for tree in trees if len(set(tree.parents)) < len(tree.parents)]
    assert forks
    assert any(len(tree.path) < len(tree.token_ids) for tree in forks)


@pytest.mark.parametrize("method", ["suffix", "ddtree"])
def test_showing_changes_no_token(model: Path, drafter: Path, method: str) -> None:
    """Who looks on gets the answer that others get."""
    given = params(temperature=0.7, seed=5)
    shown = outputs(built(model, drafter, method), given)
    hidden = outputs(built(model, drafter, method), given, shows_trees=False)
    assert [o.token_ids for o in shown] == [o.token_ids for o in hidden]
    assert all(o.tree is None for o in hidden)


def test_only_the_row_that_asks_is_shown(model: Path) -> None:
    """A batch mixes requests: one that did not ask gets nothing, and pays for nothing."""
    eng = engine(model, method="ngram")
    both = [
        request("shown", PROMPT, params(), shows_trees=True),
        request("hidden", PROMPT, params()),
    ]
    found = run(eng, both)
    assert any(o.tree for o in found["shown"].outputs)
    assert not any(o.tree for o in found["hidden"].outputs)
    assert found["shown"].tokens == found["hidden"].tokens


def test_a_stop_cuts_the_path(model: Path, drafter: Path) -> None:
    """What lies past a stop was never emitted, so the page must not show it as accepted."""
    whole = outputs(built(model, drafter, "suffix"), params(max_tokens=60))
    step = next(o for o in whole if o.tree and len(o.tree.path) > 2 and o.finish_reason is None)
    kept = step.tree.start + 1

    class Stop:
        left = kept

        def feed(self, token_ids: list[int]) -> int | None:
            if len(token_ids) >= self.left:
                return self.left
            self.left -= len(token_ids)
            return None

    asked = request("a", PROMPT, params(max_tokens=60), shows_trees=True, stopper=Stop())
    last = run(built(model, drafter, "suffix"), [asked])["a"].last
    assert last.finish_reason is FinishReason.STOP
    assert len(last.tree.path) == 2
    assert list(last.tree.emitted) == list(last.token_ids) == spelled(last.tree)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tree_that_the_device_grows_is_shown_alike(
    model: Path, drafter: Path, temperature: float
) -> None:
    """As on a GPU, where steps are graphs and nobody reads the tree before it is verified."""
    given = params(temperature=temperature, seed=5)
    read = [out.tree for out in outputs(built(model, drafter, "ddtree"), given)]
    eng = built(model, drafter, "ddtree")
    graphs = as_on_gpu(eng)
    seen = [out.tree for out in outputs(eng, given)]
    assert graphs.num_captured
    assert not graphs.num_eager
    assert seen[0] is read[0] is None
    for tree, other in zip(seen[1:], read[1:], strict=True):
        assert tree is not None
        assert other is not None
        if tree.start < 15:  # the host leaves out what would come after the last token
            assert _branches(tree) == _branches(other)
        assert spelled(tree) == spelled(other)
        assert tree.start == other.start


def test_rows_of_a_batch_are_shown_their_own_trees(model: Path, drafter: Path) -> None:
    """Of padded steps over uneven trees, one step late; who did not ask gets none."""
    eng = built(model, drafter, "ddtree")
    as_on_gpu(eng)
    jobs = [request(f"{i}", PROMPT[i:], params(), shows_trees=i != 1) for i in range(3)]
    for name, outcome in run(eng, jobs).items():
        trees = [out.tree for out in outcome.outputs]
        if name == "1":
            assert not any(trees)
            continue
        emitted: list[int] = list(outcome.outputs[0].token_ids)
        for out, tree in zip(outcome.outputs[1:], trees[1:], strict=True):
            assert tree is not None
            assert tree.token_ids[0] == emitted[-1]
            own = list(out.token_ids[len(tree.path) - 1 :])
            assert spelled(tree) + own == list(out.token_ids)
            assert [tree.sources[n] for n in tree.path[1:]] == list(
                out.sources[: len(tree.path) - 1]
            )
            emitted += out.token_ids
        stats = outcome.last.stats
        assert sum(len(tree.token_ids) - 1 for tree in trees[1:]) == stats.num_drafted > 0


def _branches(tree: VerifiedTree) -> set[tuple[int, ...]]:
    """The paths to all nodes, which are the same however the nodes are ordered."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def test_a_given_tree_is_shown_on_a_device_too(model: Path) -> None:
    """Host drafters' trees are known wherever they are verified."""
    eng = engine(model, method="ngram")
    as_on_gpu(eng)
    trees = [o.tree for o in outputs(eng, params()) if o.tree]
    assert any(len(tree.path) > 1 for tree in trees)
    shown = [token for tree in trees for token in tree.emitted]
    assert (
        shown == run(engine(model, method="none"), [request("p", PROMPT, params())])["p"].tokens[1:]
    )
