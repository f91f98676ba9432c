"""Random candidates for the kernels of drafter networks, and what they must give: `ops/reference`.

Used in Triton's interpreter (`tests/interpreted/triton_drafts.py`) and on a GPU (`tests/gpu/test_drafts.py`).
"""

from __future__ import annotations

import random
from dataclasses import fields

import torch
from torch import Tensor

from paceline.core.tree import DraftTree
from paceline.ops.reference import candidates as definition
from paceline.ops.reference import growth as growth_definition
from paceline.ops.reference.chain import chain as definition_of_chain
from paceline.ops.reference.chain import emitted as definition_of_emitted
from paceline.ops.triton import candidates, chain, growth, largest
from paceline.sample.noise import keyed_noise, noise_ahead
from tests.tree_grid import poisoned, same
from tests.unit.draft.test_ddtree import random_case

VOCAB = 60


def tables(positions: int) -> list[Tensor]:
    """What was learned: log sharpness, information, held, claimed; views of wider memory."""
    return [x[:, 1 : positions + 1] for x in torch.rand(4, 4, positions + 2) + 0.5]


def close(found: Tensor, want: Tensor, what: str, tolerance: float = 2e-5) -> None:
    """Equal up to the order of sums; NaN where the other is NaN."""
    torch.testing.assert_close(
        found.cpu(),
        want,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )


def check_largest(rng: random.Random, device: str) -> None:
    """The largest numbers bit for bit, of equals the lowest ids, and the mass of all."""
    shape = rng.randint(1, 3), rng.randint(1, 3), rng.choice([60, 64, 200, 1024, 4100, 8256])
    count = min(rng.choice([1, 2, 5, 16, 40, 128]), shape[2])
    logits = torch.randn(shape) * rng.choice([0.0, 3.0])
    if rng.random() < 0.4:
        logits = logits.round()  # ties
    for value in (float("-inf"), float("inf"), float("nan")):
        if rng.random() < 0.2:
            some = torch.rand(shape[2]) < rng.choice([0.001, 0.01, 1.0])
            logits[rng.randrange(shape[0]), rng.randrange(shape[1]), some] = value
    wide = torch.zeros(shape[0], 3).double()  # a column of a wider table, as the rows' options are
    wide[:, 1] = torch.tensor([rng.choice([0.0, 0.3, 1.0]) for _ in range(shape[0])])
    temperature = wide[:, 1] if rng.random() < 0.8 else None
    moved = None if temperature is None else wide.to(device)[:, 1]
    with poisoned():
        top, ids, mass = largest.largest(logits.to(device), moved, count)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    want = order[:, :, :count].sort(dim=-1).values
    same(ids, want, "ids")
    every = definition.largest(logits, temperature, shape[2])
    values = torch.empty_like(logits).scatter_(-1, every[1], every[0])  # of every token, tempered
    close(top, values.gather(-1, want), "values", 0.0)
    close(mass, every[2], "mass")


def check_rank(rng: random.Random, device: str) -> None:
    """Order, shares and weights of one batch; ties, numbers that are none, with noise and without."""
    shape = rng.randint(1, 4), rng.randint(1, 6), rng.choice([1, 2, 5, 16, 17, 40])
    top = torch.randn(shape) * 3
    if rng.random() < 0.4:
        top = top.round()  # ties
    if rng.random() < 0.1:
        top[0, 0, rng.randrange(shape[2])] = rng.choice([float("nan"), float("-inf")])
    ids = torch.stack([torch.randperm(VOCAB)[: shape[2]] for _ in range(shape[0] * shape[1])])
    ids = ids.view(shape)
    mass = top.logsumexp(-1) + torch.rand(shape[:2])
    noise = torch.randn(shape).round(decimals=1) if rng.random() < 0.5 else None
    temperature = torch.tensor([rng.choice([0.0, 0.7, 1.0]) for _ in range(shape[0])]).double()
    log, held, _, claimed = tables(shape[1])
    given = top, ids, mass, noise, temperature, log, held, claimed
    moved = [x if x is None else x.to(device) for x in given]
    want = definition.rank_candidates(*given)
    with poisoned():
        found = candidates.rank_candidates(*moved)
    same(found[0], want[0], "ids")
    for name, mine, true in zip(("scores", "share", "on", "off"), found[1:], want[1:], strict=True):
        close(mine, true, name)


def check_learn(rng: random.Random, device: str) -> None:
    """Tables after some steps' judgements: none emitted, no candidate emitted, off the spine."""
    rows, positions, count = rng.randint(1, 9), rng.randint(1, 6), rng.choice([1, 2, 16, 33])
    mine = [x.to(device) for x in tables(positions)]
    want = [x.cpu().clone() for x in mine]
    for _ in range(3):
        ids = torch.stack([torch.randperm(VOCAB)[:count] for _ in range(rows * positions)])
        ids = ids.view(rows, positions, count)
        scores = (torch.randn(ids.shape) * 2).sort(-1, descending=True).values
        share = -torch.rand(rows, positions)
        temperature = torch.tensor([rng.choice([0.0, 0.7, 1.0]) for _ in range(rows)]).double()
        emitted = torch.full((rows, positions), -1)
        for row in range(rows):
            for position in range(rng.randint(0, positions)):
                token = int(ids[row, position, min(rng.choice([0, 0, 0, 1, 4]), count - 1)])
                emitted[row, position] = token if rng.random() < 0.9 else VOCAB
        given = ids, scores, share, temperature, emitted
        definition.learn(*given, tuple(want), 0.998, (-2.3, 2.3))
        candidates.learn(*(x.to(device) for x in given), tuple(mine), 0.998, (-2.3, 2.3))
    names = "log sharpness", "information", "held", "claimed"
    for name, a, b in zip(names, mine, want, strict=True):
        close(a, b, name, 1e-3)  # a variance is a difference of squares


def check_growth(rng: random.Random, device: str) -> None:
    """The same tree, bit for bit: nodes, order, masks and scores."""
    roots, found, budget, cap = random_case(rng)
    width = cap or found.ids.shape[2]
    given = roots, found.ids, found.weights, found.off_spine
    want = growth_definition.best_first(*given, budget, width, 4)
    with poisoned():
        mine = growth.best_first(*(x.to(device) for x in given), budget, width, 4)
    for field in fields(DraftTree):
        same(getattr(mine, field.name), getattr(want, field.name), field.name)


def check_noise(rng: random.Random, device: str) -> None:
    """The noise of a pick, of some tokens: keyed by row, position and token; none in greedy rows."""
    capacity, spots, count = 5, rng.randint(1, 9), rng.choice([1, 16, 130])
    floats, ints = torch.zeros(capacity + 1, 6).double(), torch.zeros(capacity + 1, 7).long()
    floats[:, 0] = torch.tensor([rng.choice([0.0, 0.7, 1.0]) for _ in range(capacity + 1)])
    ints[:, 1] = torch.tensor([rng.getrandbits(64) - 2**63 for _ in range(capacity + 1)])
    rows = torch.tensor([rng.randrange(-1, capacity + 1) for _ in range(spots)])
    positions = torch.tensor([rng.randrange(2**20) for _ in range(spots)])
    ids = torch.randint(0, 150_000, (spots, count))
    want = keyed_noise(rows, positions, ids, ints[:, 1], floats[:, 0])
    there = ints.to(device)[:, 1], floats.to(device)[:, 0]
    with poisoned():
        found = candidates.keyed_noise(*(x.to(device) for x in (rows, positions, ids)), *there)
    close(found, want, "noise", 1e-4)
    lens, steps = torch.randint(2**20, (capacity + 1, 2))[:, 1], rng.randint(1, 15)
    ids = torch.randint(0, 150_000, (spots, steps, count))
    want = noise_ahead(rows, lens, ids, ints[:, 1], floats[:, 0])
    with poisoned():
        found = candidates.noise_ahead(rows.to(device), lens.to(device), ids.to(device), *there)
    close(found, want, "noise ahead", 1e-4)


def check_chain(rng: random.Random, device: str) -> None:
    """The best candidates behind the roots, and sums that never rise."""
    shape = rng.choice([1, 3, 33, 70]), rng.choice([1, 2, 7, 15]), rng.choice([1, 16])
    roots, ids = torch.randint(VOCAB, shape[:1]), torch.randint(VOCAB, shape)
    weights = torch.randn(shape).clamp(max=0.0)  # every other one nothing
    if rng.random() < 0.2:
        weights[0, -1, 0] = rng.choice([float("nan"), float("-inf")])
    tokens, scores = definition_of_chain(roots, ids, weights)
    with poisoned():
        mine = chain.chain(roots.to(device), ids.to(device), weights.to(device))
    same(mine[0], tokens, "tokens")
    close(mine[1], scores, "scores")
    steps = mine[1].diff(dim=1)
    assert not bool((steps > 0).any()), "a child may not score above its parent"


def check_emitted(rng: random.Random, device: str) -> None:
    """Tokens by row and position; rows without any, more than there are positions, dead entries."""
    counts = torch.tensor([rng.choice([0, 1, 4, 20]) for _ in range(rng.randint(1, 9))])
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    next_ids = torch.randint(VOCAB, (int(cu[-1]) + rng.randint(1, 3),))
    positions = rng.choice([1, 3, 15, 17])
    want = definition_of_emitted(cu, next_ids, positions)
    with poisoned():
        found = chain.emitted(cu.to(device), next_ids.to(device), positions)
    same(found, want, "emitted")
