from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.tree import (
    EMPTY,
    NOT_FINITE,
    Proposal,
    Selection,
    Verdict,
    from_proposals,
)
from paceline.ops.reference.tree import select
from paceline.sample.hostwalk import verify_host
from paceline.sample.options import SamplingTable
from paceline.sample.verifier import verify, verify_device
from tests.oracle import sampling as oracle
from tests.oracle import tree as tree_oracle
from tests.oracle.toy import Row, ToyModel, Verify, decode
from tests.oracle.toy_drafters import drafting, of_paths, once

V = 23
BOTH = [verify, verify_device]
OPTIONS = {
    "plain": {},
    "top_k, top_p, min_p": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "bias and masks": {"logit_bias": {3: 2.0, 4: -3.0}, "banned_token_ids": [1, 2]},
    "allowed, min_tokens": {"allowed_token_ids": list(range(0, V, 2)), "min_tokens": 9},
    "everything": {
        "top_k": 15,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.6,
        "logit_bias": {0: 1.0},
        "banned_token_ids": [5],
        "min_tokens": 5,
        "logprobs": 2,
    },
}


def host(*args: object) -> Verdict:
    """`verify` drops `host_rows` on a CPU; the same call without the switch."""
    tree, selection, hidden, head, table, rows, lens, _host_rows, allowed = args
    return verify_host(tree, selection, hidden, head, table, rows, lens, allowed)


def rows_of(model: ToyModel, params: dict[str, Any], rng: random.Random | None) -> list[Row]:
    """Five requests of different lengths, seeds and stop ids, with or without a drafter."""
    rows = []
    for i in range(5):
        most = max([40, 17, 25, 1, 2][i], params.get("min_tokens", 0))
        row = Row(
            prompt=[7, i, 7, 3][: 1 + i % 4],
            params=SamplingParams(**params, max_tokens=most),
            seed=100 + i,
            sample_index=i % 2,
            stop_ids=((), (0, 9), (8,), (), (22,))[i],
        )
        if rng is not None:
            row.propose = drafting(model, rng, 14)
        rows.append(row)
    return rows


@pytest.mark.parametrize("way", [*BOTH, host], ids=["verify", "device", "host"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_do_not_depend_on_the_drafter(name: str, temperature: float, way: Verify) -> None:
    """Losslessness: any trees, any budgets, any company, same tokens as one at a time, alone."""
    model = ToyModel(V, spread=3.5)
    params = OPTIONS[name] | {"temperature": temperature}
    alone = rows_of(model, params, None)
    for row in alone:
        decode(model, [row], verify)
    rng = random.Random(name + str(temperature))
    drafted = rows_of(model, params, rng)
    decode(model, drafted, way, rng=rng)
    for a, b in zip(alone, drafted, strict=True):
        assert a.output == b.output
        assert set(a.counts) <= {1}
        assert len(a.logprobs) == len(b.logprobs) == (len(a.output) if "logprobs" in params else 0)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-12)
    assert sum(c - 1 for b in drafted for c in b.counts) > 5, "some drafts must be accepted"


def test_tokens_are_the_rules_tokens_in_every_step() -> None:
    """Position, output count and penalties of a whole sequence, against the rules in Python."""
    model = ToyModel(V)
    params = SamplingParams(**(OPTIONS["everything"] | {"temperature": 0.9, "max_tokens": 60}))
    rng = random.Random(5)
    row = Row(prompt=[4, 4, 9], params=params, seed=-3, sample_index=2, stop_ids=(6,))
    row.propose = drafting(model, rng, 12)
    decode(model, [row], verify)
    key = oracle.key(-3, 2)
    for i, token in enumerate(row.output):
        text = row.prompt + row.output[:i]
        law = oracle.process(
            model.table[model.hidden(text)].tolist(),
            params,
            prompt=row.prompt,
            output=row.output[:i],
            stop_ids=[6],
        )
        assert token == oracle.token(law, 0.9, key, len(text))
    assert row.output[-1] == 6 or len(row.output) == 60


@pytest.mark.parametrize("way", BOTH)
def test_a_grammar_holds_on_every_path(way: Verify) -> None:
    """A flat mask lets a branch leave the grammar: each node has the mask of its own path."""
    model = ToyModel(V)

    def grammar(output: Sequence[int]) -> set[int]:
        last = output[-1] if output else 0
        return {(last + 1) % V, (last + 5) % V, (last + 11) % V}

    outputs = []
    for drafts in (False, True):
        rng = random.Random(1)
        rows = rows_of(model, {"temperature": 1.0}, rng if drafts else None)
        for row in rows[:2]:
            row.grammar = grammar
        decode(model, rows, way, rng=rng if drafts else None)
        outputs.append([row.output for row in rows])
        for row in rows[:2]:
            pairs = zip([0, *row.output], row.output, strict=False)
            assert all((b - a) % V in (1, 5, 11) for a, b in pairs)
    assert outputs[0] == outputs[1]


def step(
    props: list[Proposal],
    targets: dict[tuple[int, int], int],
    way: Verify,
    *,
    lens: int = 10,
    limit: int = 1000,
    stop_ids: Sequence[int] = (),
    roots: Sequence[int] | None = None,
    live: Sequence[bool] | None = None,
    selection: Selection | None = None,
    rows: Sequence[int] | None = None,
) -> Verdict:
    """One greedy verify whose target at (row, node) is given (else token 20)."""
    table = SamplingTable(len(props), V, "cpu", 0)
    for r in range(len(props)):
        table.assign(
            r,
            SamplingParams(temperature=0),
            seed=0,
            sample_index=0,
            prompt_ids=[0] * 5,
            output_ids=[],
            stop_ids=stop_ids,
            limit=limit,
        )
    if live is not None:
        table.live[: len(props)] = torch.tensor(live)
    ids = torch.tensor(rows if rows is not None else range(len(props)))
    tree = from_proposals(roots or [1] * len(props), props)
    width = tree.token_ids.shape[1]
    if selection is None:
        selection = select(tree, ids, 10_000, torch.full((len(props),), 999))
    want = [targets.get(divmod(n, width), 20) for n in selection.node.clamp(min=0).tolist()]
    hidden = torch.nn.functional.one_hot(torch.tensor(want, dtype=torch.int64), V).float()
    return way(
        tree,
        selection,
        hidden,
        lambda x: x,
        table,
        ids,
        torch.full((len(props),), lens),
        [r for r in ids.tolist() if r < len(props)],
        None,
    )


CHAIN = Proposal(tokens=[2, 3, 4], parents=[-1, 0, 1], scores=[-1, -2, -3])
FORK = Proposal(tokens=[2, 3, 0, 5], parents=[-1, -1, 1, 2], scores=[-1, -1, -2, -3])


@pytest.mark.parametrize("way", BOTH)
def test_the_path_is_in_indices_of_the_rows_selected_nodes(way: Verify) -> None:
    """The cache moves by these: an index of the tree, or of the batch, moves the wrong entries."""
    verdict = step([CHAIN, FORK], {(0, 0): 9, (1, 0): 3, (1, 2): 0, (1, 3): 7}, way)
    assert verdict.count.tolist() == [1, 3]
    assert verdict.path[:, :3].tolist() == [[0, -1, -1], [0, 2, 3]]
    assert verdict.path_tokens[:, :3].tolist() == [[1, -1, -1], [1, 3, 0]]
    assert verdict.next_token.tolist() == [9, 7]
    assert verdict.alive.tolist() == [True, True]


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("limit", range(12, 18))
def test_the_walk_stops_at_the_limit(way: Verify, limit: int) -> None:
    """Lens 10, so the root emits the 12th known token: no token more than the limit is emitted."""
    verdict = step([CHAIN], {(0, 0): 2, (0, 1): 3, (0, 2): 4, (0, 3): 5}, way, limit=limit)
    emitted = min(limit - 11, 4)
    assert verdict.count.tolist() == [emitted]
    assert verdict.next_token.tolist() == [[2, 3, 4, 5][emitted - 1]]
    assert verdict.alive.tolist() == [limit > 15]


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("at", range(4))
def test_the_walk_stops_at_a_stop_id(way: Verify, at: int) -> None:
    """A drafted and accepted stop id is the last token: its children are not entered."""
    verdict = step(
        [CHAIN],
        {(0, 0): 2, (0, 1): 3, (0, 2): 4, (0, 3): 5},
        way,
        stop_ids=[[2, 3, 4, 5][at], 17],
    )
    assert verdict.count.tolist() == [at + 1]
    assert verdict.next_token.tolist() == [[2, 3, 4, 5][at]]
    assert verdict.alive.tolist() == [False]


@pytest.mark.parametrize("way", BOTH)
def test_padding_matches_nothing_and_token_0_is_a_token(way: Verify) -> None:
    """Trees of different sizes share a batch: the small ones' padding is nobody's child."""
    star = Proposal(tokens=[0, 6], parents=[-1, -1], scores=[-1, -1])
    verdict = step([star, EMPTY, FORK], {(0, 0): 0, (1, 0): 0, (2, 0): 0}, way)
    assert verdict.count.tolist() == [2, 1, 1]
    assert verdict.path[0, :2].tolist() == [0, 1]
    assert verdict.next_token.tolist() == [20, 0, 0]


@pytest.mark.parametrize("way", BOTH)
def test_dead_and_padded_rows_do_nothing(way: Verify) -> None:
    """A finished row that is still in the batch, and the spare row, accept and emit nothing."""
    targets = {(b, 0): 2 for b in range(3)}
    verdict = step(
        [CHAIN, CHAIN, CHAIN],
        targets,
        way,
        live=[True, False, True],
        rows=[0, 1, 3],
        roots=[1, 8, 9],
    )
    assert verdict.count.tolist() == [2, 0, 0]
    assert verdict.alive.tolist() == [True, False, False]
    assert verdict.next_token.tolist() == [20, 8, 9]
    assert (verdict.path[1:] == -1).all()
    assert (verdict.path_tokens[1:] == -1).all()


@pytest.mark.parametrize("way", BOTH)
def test_dead_entries_and_rows_without_nodes_are_harmless(way: Verify) -> None:
    """Fixed shapes leave entries past cu_q[B] and rows with no query: neither is anybody's."""
    selection = Selection(
        node=torch.tensor([4, 5, 6, -1, -1]),
        cu_q=torch.tensor([0, 0, 3, 3]),
        mask=torch.zeros(5, 1, dtype=torch.int64),
    )
    verdict = step([CHAIN, CHAIN, CHAIN], {(1, 0): 2, (1, 1): 3}, way, selection=selection)
    assert verdict.count.tolist() == [0, 3, 0]
    assert verdict.path[1, :3].tolist() == [0, 1, 2]
    assert verdict.next_token.tolist() == [1, 20, 1]
    assert verdict.alive.tolist() == [False, True, False]


def test_both_ways_agree_on_everything() -> None:
    """Any trees, selections, dead rows, stops and limits, often nothing accepted: one verdict."""
    rng = random.Random(8)
    none, some = 0, 0
    for _ in range(300):
        batch = rng.randint(1, 4)
        props = [tree_oracle.random_proposal(rng, rng.randint(0, 9), 4) for _ in range(batch)]
        tree = from_proposals([1] * batch, props)
        width = tree.token_ids.shape[1]
        ids = torch.arange(batch)
        chosen = select(tree, ids, rng.randint(batch, batch * width), torch.full((batch,), 5))
        targets = {(b, n): rng.randrange(6) for b in range(batch) for n in range(width)}
        kw = {
            "live": [rng.random() < 0.8 for _ in range(batch)],
            "limit": rng.choice([12, 13, 1000]),
            "stop_ids": rng.choice([(), (3,)]),
            "selection": chosen,
        }
        a, b = (step(props, targets, way, **kw) for way in BOTH)
        levels = a.path.shape[1]
        assert torch.equal(a.path, b.path[:, :levels])
        assert torch.equal(a.path_tokens, b.path_tokens[:, :levels])
        assert (b.path[:, levels:] == -1).all()
        for name in ("count", "next_token", "alive"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        none += int((a.count == 0).sum())
        some += int((a.count > 1).sum())
    assert none > 50
    assert some > 50


@pytest.mark.parametrize("way", BOTH)
def test_a_tree_of_256_nodes_is_walked(way: Verify) -> None:
    """The largest tree, and a batch whose nodes fill several chunks of the head."""
    chain = Proposal(
        tokens=[i % 19 for i in range(255)],
        parents=list(range(-1, 254)),
        scores=[-0.1 * i for i in range(255)],
    )
    targets = {(b, n): n % 19 for b in range(3) for n in range(255)}
    targets[1, 100] = 20
    verdict = step([chain] * 3, targets, way, roots=[18] * 3)
    assert verdict.count.tolist() == [256, 101, 256]
    assert verdict.path[0].tolist() == list(range(256))


@pytest.mark.parametrize("way", BOTH)
def test_a_nan_row_harms_nobody(way: Verify) -> None:
    """A row whose hidden states broke ends there; its neighbour's verdict is untouched."""
    table = SamplingTable(2, V, "cpu", 0)
    for r in range(2):
        table.assign(
            r,
            SamplingParams(temperature=1.0, logprobs=2),
            seed=r,
            sample_index=0,
            prompt_ids=[0],
            output_ids=[],
            stop_ids=[],
            limit=99,
        )
    tree = from_proposals([1, 1], [CHAIN, FORK])
    ids = torch.arange(2)
    chosen = select(tree, ids, 99, torch.tensor([9, 9]))
    hidden = torch.randn(len(chosen.node), V)

    def run(x: torch.Tensor) -> Verdict:
        return way(tree, chosen, x, lambda h: h, table, ids, torch.tensor([1, 1]), [0, 1])

    good = run(hidden)
    broken = hidden.clone()
    broken[:4] = torch.nan
    got = run(broken)
    assert int(got.next_token[0]) == NOT_FINITE
    assert got.count[0] == 1
    assert not got.alive[0]
    for name in ("path", "path_tokens", "count", "next_token", "alive", "logprobs", "top_ids"):
        a, b = getattr(got, name)[1], getattr(good, name)[1]
        levels = min(a.numel(), b.numel())
        assert torch.equal(a.nan_to_num().view(-1)[:levels], b.nan_to_num().view(-1)[:levels])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_larger_tree_never_accepts_less(temperature: float) -> None:
    """Noise is shared by all nodes of a depth, so another sibling can only add a match."""
    model = ToyModel(V)
    rng = random.Random(12)
    more = 0
    for case in range(60):
        params = SamplingParams(temperature=temperature, max_tokens=8)
        text = [rng.randrange(V) for _ in range(4)]
        plain = Row(prompt=text, params=params, seed=case)
        decode(model, [plain], verify)
        # Random paths and the right one; no two siblings are equal.
        wild = drafting(model, rng, 8)([*text, plain.output[0]])
        paths = {tuple(plain.output[1 : 1 + n]) for n in range(1, 5)}
        for node in range(1, len(wild.tokens) + 1):
            above = reversed(tree_oracle.ancestors(wild, node)[:-1])
            paths.add(tuple(wild.tokens[n - 1] for n in above))
        some = {p for p in paths if rng.random() < 0.8}
        some = {p for p in some if all(p[:n] in some for n in range(1, len(p)))}
        counts = []
        for kept in (some, paths):
            part = of_paths(kept, rng)
            row = Row(prompt=text, params=params, seed=case, propose=once(part, len(text) + 1))
            decode(model, [row], verify)
            assert row.output == plain.output
            counts.append(row.counts[0])
        assert counts[0] <= counts[1] == 5
        more += counts[1] > counts[0]
    assert more > 20
