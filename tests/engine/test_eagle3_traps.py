"""What goes wrong with EAGLE drafts elsewhere: stale or unpublishable entries, wrong taps, dead rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.request import Request, SamplingParams
from paceline.draft.base import Commit
from paceline.engine.engine import Engine
from tests import tiny, tiny_eagle3
from tests.engine.harness import Outcome, engine, request, run

PROMPTS = [
    [11, 12, 13, 14, 15] * 4,
    [31, 7, 7, 7, 9, 31, 7],
    [5, 6],
    [(3 * i) % 23 + 3 for i in range(33)],
]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@pytest.fixture(scope="session")
def plain(model: Path) -> dict[str, Outcome]:
    """Greedy plain decoding."""
    return run(engine(model, method="none"), jobs())


@pytest.fixture(scope="session")
def trained(
    model: Path, plain: dict[str, Outcome], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A drafter that half knows the greedy answers."""
    texts = [p + plain[str(i)].tokens for i, p in enumerate(PROMPTS)]
    folder = tmp_path_factory.mktemp("trained") / "drafter"
    return tiny_eagle3.overfit_eagle3(folder, model, texts, steps=120)


def jobs(params: SamplingParams = GREEDY) -> list[Request]:
    return [request(str(i), p, params) for i, p in enumerate(PROMPTS)]


def accepted(eng: Engine) -> float:
    return eng.report()["spec_decode_num_accepted_tokens"]


def check(done: dict[str, Outcome], plain: dict[str, Outcome]) -> None:
    assert {n: o.tokens for n, o in done.items()} == {n: o.tokens for n, o in plain.items()}


def test_taps_off_by_one_accept_less(
    model: Path, trained: Path, plain: dict[str, Outcome], tmp_path: Path
) -> None:
    """Taps one layer off: outputs stay right and drafts get worse, silently. So where a file's numbers
    are counted from must be right.
    """
    values = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    key = "eagle_aux_hidden_state_layer_ids"
    assert values["eagle_config"][key] == [0, 1, 1]
    changes: dict[str, dict[str, object]] = {
        "right": {},
        "others": {"eagle_config": {key: [1, 0, 0]}},
    }
    counts = {}
    for name, change in changes.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values | change), encoding="utf-8")
        (folder / "model.safetensors").symlink_to(trained / "model.safetensors")
        eng = engine(model, method="eagle3", model=str(folder))
        check(run(eng, jobs()), plain)
        counts[name] = accepted(eng)
    assert counts["right"] > 1.2 * counts["others"]


def test_true_features_are_worth_their_writing(
    model: Path, trained: Path, plain: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted drafts whose entries keep the guessed features accept less (vLLM #14649)."""
    counts = []
    for rewriting in (True, False):
        eng = engine(model, method="eagle3", model=str(trained))
        drafter: Any = eng._proposer._drafter

        def observe(commit: Commit, eng: Engine = eng, real: Any = drafter.observe) -> None:
            (sequence,) = eng._scheduler.running
            if sequence.num_emitted:  # a verify: all entries but the last were guessed
                count = min(int(commit.cu[-1]) - 1, eng.spec.scratch)
                guessed = torch.arange(len(commit.slots)) < count
                commit = replace(commit, slots=commit.slots.masked_fill(guessed, -1))
            real(commit)

        if not rewriting:
            monkeypatch.setattr(drafter, "observe", observe)
        for job in jobs():
            check(run(eng, [job]), {job.id: plain[job.id]})
        counts.append(accepted(eng))
    assert counts[0] > counts[1]


@pytest.mark.parametrize("topk", [1, 3])
def test_stale_memory_is_never_read(
    model: Path, trained: Path, plain: dict[str, Outcome], topk: int
) -> None:
    """A draft pool full of NaN changes nothing: not at first, and not on a prefix hit."""
    counts = []
    for fill in (0.0, torch.nan):
        eng = engine(
            model, method="eagle3", model=str(trained), eagle_topk=topk, num_pages=30, max_len=100
        )
        pool = eng._proposer._drafter._runtime._pool
        pool.k.fill_(fill)
        pool.v.fill_(fill)
        for _ in range(2):
            check(run(eng, jobs()), plain)
        counts.append(accepted(eng))
    assert counts[0] == counts[1] > 0


def published(eng: Engine) -> Iterator[tuple[list[int], list[int]]]:
    """Every findable page with its prefix: (tokens with the lookahead's, pages)."""
    todo: list[tuple[Any, list[int], list[int]]] = [
        (root, [], []) for root in eng._scheduler._prefix._roots.values()
    ]
    while todo:
        node, tokens, pages = todo.pop()
        if pages:
            yield tokens, pages
        for key, child in node.children.items():
            todo.append((child, [*tokens[: len(pages) * 4], *key], [*pages, child.page]))


class StopAfter:
    """A stop matcher that ends a request in the middle of an accepted run."""

    def __init__(self, count: int) -> None:
        self._left = count

    def feed(self, tokens: Sequence[int]) -> int | None:
        self._left -= len(tokens)
        return None if self._left > 0 else len(tokens) + self._left


def test_published_pages_hold_what_their_key_says(model: Path, trained: Path) -> None:
    """Runs cut at every length, so that pages end before, at and after the cut: a findable page holds
    the entries of its tokens and of the token after it, never of one that was cut off.
    """
    eng = engine(model, method="eagle3", model=str(trained), eagle_topk=2, eagle_num_steps=3)
    net, drafter = eng._launcher._target.net, eng._proposer._drafter
    pool = drafter._runtime._pool
    for cut in range(1, 14):
        for i, prompt in enumerate(PROMPTS[:2]):
            job = request(f"{cut}/{i}", prompt, GREEDY, stopper=StopAfter(cut))
            run(eng, [job])
    checked = 0
    for tokens, pages in published(eng):
        ((k, v),) = tiny_eagle3.eagle3_truth(drafter, net, tokens)
        slots = [page * 4 + i for page in pages for i in range(4)]
        torch.testing.assert_close(pool.k[0][:, slots].transpose(0, 1), k, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(pool.v[0][:, slots].transpose(0, 1), v, rtol=1e-9, atol=1e-9)
        checked += 1
    assert checked > 10


def test_another_continuation_does_not_share_the_page_before_it(model: Path, trained: Path) -> None:
    """Two prompts that part exactly at a page's end share all pages but that one, whose last entry is
    made with the token after it (SGLang's pairs of tokens, vLLM's dropped page).
    """
    eng = engine(model, method="eagle3", model=str(trained))
    net, drafter = eng._launcher._target.net, eng._proposer._drafter
    pool, shared = drafter._runtime._pool, PROMPTS[3][:12]
    checked = 0

    def watch(_: int) -> None:
        nonlocal checked
        for sequence in eng._scheduler.running:
            count = sequence.num_cached
            slots = eng._rows.slots(torch.full((count,), sequence.row), torch.arange(count))
            ((k, _v),) = tiny_eagle3.eagle3_truth(drafter, net, sequence.tokens[: count + 1])
            torch.testing.assert_close(pool.k[0][:, slots].transpose(0, 1), k, rtol=1e-9, atol=1e-9)
            checked += count

    for i, (after, hit) in enumerate(((40, 0), (41, 8), (40, 12), (41, 12))):
        job = request(str(i), [*shared, after, 3], GREEDY)
        stats = run(eng, [job], on_step=watch)[str(i)].last.stats
        assert stats is not None
        assert stats.num_cached_tokens == hit
    assert checked > 100


def test_hits_are_those_of_plain_decoding(model: Path, trained: Path) -> None:
    """A second turn finds as many cached tokens as without speculation, but for a page that ends with
    the first turn's last token (vLLM's last-block drop costs a page in every hit).
    """
    for count in range(5, 13):
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        hits = {}
        for method in ("none", "eagle3"):
            folder = {} if method == "none" else {"model": str(trained)}
            eng = engine(model, method=method, **folder)
            first = run(eng, [request("a", PROMPTS[0], params)])["a"].tokens
            prompt = [*PROMPTS[0], *first, 50, 51, 52]
            stats = run(eng, [request("b", prompt, params)])["b"].last.stats
            assert stats is not None
            hits[method] = stats.num_cached_tokens
        known = len(PROMPTS[0]) + count
        assert hits["none"] == (known - 1) // 4 * 4
        assert hits["eagle3"] == hits["none"], "the newest token is never cached, so it is known"


def test_a_dead_row_s_commit_changes_nothing(model: Path, trained: Path) -> None:
    """A row that accepts nothing keeps its newest feature, and writes no entry; others' are theirs."""
    eng = engine(model, method="eagle3", model=str(trained))
    drafter: Any = eng._proposer._drafter
    features, pool = drafter._features, drafter._runtime._pool
    features.normal_()
    before, keys = features.clone(), pool.k.clone()
    zeros = torch.zeros(3, dtype=torch.int64)
    commit = Commit(
        rows=torch.tensor([0, 1, 2]),
        cu=torch.tensor([0, 0, 2, 2]),
        token_ids=zeros,
        next_ids=torch.tensor([4, 5, 0]),
        positions=torch.tensor([8, 9, 0]),
        slots=torch.tensor([8, 9, -1]),
        hidden=torch.randn(3, 192, dtype=torch.float64),
    )
    drafter.observe(commit)
    assert torch.equal(features[[0, 2]], before[[0, 2]])
    assert commit.hidden is not None
    torch.testing.assert_close(features[1], drafter.net.project(commit.hidden)[1])
    changed = (pool.k != keys).any(3).any(1)[0].nonzero().flatten().tolist()
    assert [slot for slot in changed if slot < pool.num_pages * 4] == [8, 9]
    drafter.observe(replace(commit, cu=torch.zeros(4, dtype=torch.int64), slots=zeros - 1))
    assert torch.equal(features[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize(
    "drafting, nodes, depth",
    [
        ({"num_speculative_tokens": 60, "eagle_topk": 2, "eagle_num_steps": 2}, 6, 2),
        ({"num_speculative_tokens": 60}, 7, 7),
        ({"num_speculative_tokens": 3}, 3, 3),
        ({"num_speculative_tokens": 3, "eagle_topk": 9}, 3, 3),
        ({"num_speculative_tokens": 0, "eagle_topk": 9}, 0, 0),
    ],
)
def test_as_many_nodes_as_there_can_be(
    model: Path,
    trained: Path,
    plain: dict[str, Outcome],
    drafting: dict[str, Any],
    nodes: int,
    depth: int,
) -> None:
    """More nodes than are looked at are not proposed (sglang #6309), and drafts are of the draft
    vocabulary alone, though the text is not.
    """
    eng = engine(model, method="eagle3", model=str(trained), **drafting)
    drafter: Any = eng._proposer._drafter
    assert (eng.spec.max_nodes, eng.spec.max_depth) == (1 + nodes, depth)
    tree = drafter.propose(torch.tensor([0, 1]))
    assert tree.token_ids.shape == (2, 1 + nodes)
    assert set(tree.token_ids[:, 1:].flatten().tolist()) <= set(drafter.net.d2t.tolist())
    check(run(eng, jobs()), plain)
    assert (accepted(eng) > 0) == (nodes > 0)


@pytest.mark.parametrize("topk", [1, 3])
def test_what_was_emitted_is_learned_from(model: Path, trained: Path, topk: int) -> None:
    """Survival estimates learn in the engine: from greedy rows for greedy ones, sampled for sampled;
    and estimates come nearer to what was accepted.
    """
    for kind, temperature in enumerate((0.0, 1.0)):
        eng = engine(model, method="eagle3", model=str(trained), eagle_topk=topk)
        calibration = eng._proposer._drafter._calibration
        before = calibration._log.clone()
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature)
        run(eng, jobs(params))
        changed = (calibration._log != before).view(2, -1).any(1).tolist()
        assert changed == [kind == 0, kind == 1]
