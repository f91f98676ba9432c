"""Random steps for the kernels of a verify step's bookkeeping, and what they must give: `ops/reference`.

Used in Triton's interpreter (`tests/interpreted/triton_tree.py`) and on a GPU (`tests/gpu/test_tree.py`).
The definitions run on the CPU, where they cut off dead entries; kernels have fixed shapes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from unittest import mock

import torch
from torch import Tensor

from paceline.core.tree import NOT_FINITE, DraftTree, Selection, Verdict, chain, from_proposals
from paceline.ops.reference import tree as reference
from paceline.ops.reference import verify as definition
from paceline.ops.triton import move, tree, walk
from tests.oracle import tree as oracle

VOCAB, STOPS, PAGE = 5, 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's proposals and its rows' state, on the CPU; the state's last row is for padding."""

    tree: DraftTree
    rows: Tensor
    caps: Tensor
    num_tokens: int
    lens: Tensor
    prompt_lens: Tensor
    limits: Tensor
    live: Tensor
    stop_ids: Tensor
    next_token: Tensor
    pages: Tensor
    num_pages: int
    dummy_page: int

    def to(self, device: str) -> Step:
        """The same elsewhere; strides stay."""
        where = torch.device(device)
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Step(**{n: x.to(where) if hasattr(x, "to") else x for n, x in moved.items()})


def random_tree(rng: random.Random, rows: int, most: int) -> DraftTree:
    """Trees of any shape, or chains whose tensors are views of one row."""
    if rng.random() < 0.2:
        tokens = torch.tensor(
            [[rng.randrange(VOCAB) for _ in range(most + 1)] for _ in range(rows)]
        )
        scores = -torch.tensor(
            [[0.0] + [rng.choice([0.0, 0.5, 1.0]) for _ in range(most)] for _ in range(rows)]
        ).cumsum(1)
        return chain(tokens, scores, 4)
    proposals = [oracle.random_proposal(rng, rng.randint(0, most), VOCAB) for _ in range(rows)]
    made = from_proposals([rng.randrange(VOCAB) for _ in proposals], proposals)
    scores = made.scores.clone()
    real = torch.arange(scores.shape[1]) < made.num_nodes.unsqueeze(1)
    for bad in (float("nan"), float("-inf")):
        if rng.random() < 0.1:  # broken or hopeless from some depth on
            scores[real & (made.depths > rng.randint(0, 4))] = bad
    sources = torch.randint(0, 5, scores.shape, dtype=torch.int8)
    return replace(made, scores=scores, sources=torch.where(real, sources, 0))


def random_step(rng: random.Random, most: int = 12, rows: int = 5) -> Step:
    """A step of up to `rows` rows with up to `most` draft nodes each."""
    batch = rng.randint(1, rows)
    made = random_tree(rng, batch, rng.randint(0, most))
    width, capacity = made.token_ids.shape[1], rows + 3
    row_ids = rng.sample(range(capacity), batch)
    for b in range(batch):
        if rng.random() < 0.15:
            row_ids[b] = rng.choice([-1, capacity])  # padding, of either kind
    caps = [rng.choice([-1, 0, 1, 2, 5, 99, 99, 99]) for _ in range(batch)]
    full = batch * width
    num_tokens = rng.choice([full, full + rng.randint(0, 9), rng.randint(batch, full)])
    lens = torch.tensor([rng.randint(0, 30) for _ in range(capacity + 1)])
    longest = -(-(int(lens.max()) + width) // PAGE)
    dummy = capacity * longest
    pages = torch.randperm(dummy).to(torch.int32)[: capacity * longest].view(capacity, longest)
    pages = torch.cat((pages, pages.new_full((1, longest), dummy)))
    if rng.random() < 0.3:  # rows that lack pages
        pages[rng.randrange(capacity), rng.randrange(longest) :] = dummy
    ints = torch.zeros(capacity + 1, 7, dtype=torch.int64)  # options are columns of one table
    ints[:, 3] = (lens - torch.randint(0, 5, lens.shape)).clamp(min=0)
    ints[:, 4] = lens + torch.tensor([rng.choice([1, 2, 3, 99, 99]) for _ in lens])
    stop_ids = torch.full((capacity + 1, STOPS), -1)
    for row in range(capacity):
        if rng.random() < 0.3:
            stop_ids[row, : rng.randint(1, 2)] = rng.randrange(VOCAB)
    live = torch.tensor([rng.random() < 0.9 for _ in range(capacity + 1)])
    live[capacity] = False
    return Step(
        tree=made,
        rows=torch.tensor(row_ids),
        caps=torch.tensor(caps),
        num_tokens=num_tokens,
        lens=lens,
        prompt_lens=ints[:, 3],
        limits=ints[:, 4],
        live=live,
        stop_ids=stop_ids,
        next_token=torch.tensor([rng.randrange(VOCAB) for _ in lens]),
        pages=pages,
        num_pages=rng.randint(1, longest),
        dummy_page=dummy,
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds what must not be there afterwards: whatever isn't written shows."""
    empty = torch.empty

    def garbage(*args: object, **kwargs: object) -> Tensor:
        made: Tensor = empty(*args, **kwargs)
        return made.fill_(True if made.dtype == torch.bool else 77)

    with (
        mock.patch.object(torch, "empty", garbage),
        mock.patch.object(
            torch, "empty_like", lambda x: garbage(x.shape, dtype=x.dtype, device=x.device)
        ),
    ):
        yield


def same(found: Tensor, want: Tensor, what: str) -> None:
    """Equal in every bit that matters: values, shape and dtype."""
    assert found.dtype == want.dtype, what
    found = found.cpu()
    assert found.shape == want.shape, f"{what}: {found.shape} for {want.shape}"
    assert torch.equal(found, want), f"{what}: {found.tolist()} for {want.tolist()}"


def run(step: Step, rng: random.Random, device: str) -> None:
    """Take one step with the kernels and with the definitions, and compare everything on the way."""
    there = step.to(device)
    chosen = check_select(step, there)
    cpu = Selection(**{f.name: getattr(chosen, f.name).cpu() for f in fields(Selection)})
    paging = {"page_size": PAGE, "dummy_page": step.dummy_page}
    args = step.rows, step.lens, step.pages
    want = definition.verify_inputs(step.tree, cpu, *args, **paging, num_pages=step.num_pages)
    moved = there.rows, there.lens, there.pages
    with poisoned():
        found = tree.verify_inputs(there.tree, chosen, *moved, **paging, num_pages=step.num_pages)
    names = "token_ids", "positions", "slots", "prefix_lens", "tail_lens", "pages"
    for name, mine, true in zip(names, found, want, strict=True):
        same(mine, true, name)
    lens = want[3]
    check_draft_inputs(step, there, rng)
    check_pick_places(step, there, chosen, cpu, lens)
    verdict = check_judge(step, there, chosen, cpu, lens, rng)
    check_move(step, there, verdict, lens, rng)
    check_commit(step, there, chosen, cpu, verdict, lens)


def check_select(step: Step, there: Step) -> Selection:
    """`select`, dead entries included."""
    want = reference.select(step.tree, step.rows, step.num_tokens, step.caps)
    with poisoned():
        found = tree.select(there.tree, there.rows, step.num_tokens, there.caps)
    live = want.node.shape[0]
    assert found.node.shape[0] == step.num_tokens, "shapes are fixed"
    same(found.cu_q, want.cu_q, "cu_q")
    same(found.node[:live], want.node, "node")
    same(found.mask[:live], want.mask, "mask")
    assert bool((found.node[live:] == -1).all())
    assert bool((found.mask[live:] == 0).all())
    return found


def check_draft_inputs(step: Step, there: Step, rng: random.Random) -> None:
    """A block, the newest entry, a level of a tree."""
    width = rng.randint(1, 9)
    level = rng.randint(0, 2)
    longest = step.pages.shape[1] * PAGE  # no place beyond the page table
    widest = longest - int(step.lens.max())
    kinds: list[dict[str, int | None]] = [{"width": 1, "offset": -1, "ahead": None, "tail": 1}]
    if width <= widest:
        kinds.append({"width": width, "offset": 0, "ahead": None, "tail": width})
    if (level + 1) * width <= widest:
        first = level * width
        kinds.append({"width": width, "offset": first, "ahead": level, "tail": first + width})
    for kind in kinds:
        paging = {"page_size": PAGE, "dummy_page": step.dummy_page, "num_pages": step.num_pages}
        want = definition.draft_inputs(step.rows, step.lens, step.pages, **kind, **paging)
        with poisoned():
            found = tree.draft_inputs(there.rows, there.lens, there.pages, **kind, **paging)
        names = "positions", "slots", "prefix_lens", "cu_q", "tail_lens", "pages"
        for name, mine, true in zip(names, found, want, strict=True):
            same(mine, true, f"{name} of {kind}")


def check_pick_places(
    step: Step, there: Step, chosen: Selection, cpu: Selection, lens: Tensor
) -> None:
    """Where the target picks; dead entries belong to the spare row."""
    want = definition.pick_places(step.tree, cpu, step.rows, lens, step.prompt_lens)
    with poisoned():
        found = tree.pick_places(
            there.tree, chosen, there.rows, lens.to(there.rows.device), there.prompt_lens
        )
    real = torch.arange(step.num_tokens) < cpu.cu_q[-1]
    spare = step.lens.shape[0] - 1
    same(found[0], torch.where(want[0] < 0, spare, want[0]), "rows of picks")
    same(torch.where(real, found[1].cpu(), 0), torch.where(real, want[1], 0), "positions of picks")
    same(torch.where(real, found[2].cpu(), 0), torch.where(real, want[2], 0), "outputs before")


def check_judge(
    step: Step,
    there: Step,
    chosen: Selection,
    cpu: Selection,
    lens: Tensor,
    rng: random.Random,
) -> Verdict:
    """The walk along tokens that often are a child's."""
    picks = []
    flat_tokens, flat_parents = step.tree.token_ids.flatten(), step.tree.parents.flatten()
    width = step.tree.token_ids.shape[1]
    for node in cpu.node.tolist():
        first = node - node % width
        mine = [n for n in range(first, first + width) if flat_parents[n] == node - first]
        liked = [int(flat_tokens[n]) for n in mine if node >= 0]
        liked = liked if rng.random() < 0.9 else []
        picks.append(rng.choice(liked or [rng.randrange(VOCAB), NOT_FINITE]))
    state = step.live, step.stop_ids, step.limits
    moved = there.live, there.stop_ids, there.limits
    token = torch.tensor(picks, dtype=torch.int64)
    want = definition.judge(step.tree, cpu, token, step.rows, lens, *state)
    dev = there.rows.device
    with poisoned():
        found = walk.judge(there.tree, chosen, token.to(dev), there.rows, lens.to(dev), *moved)
    for name in ("path", "path_tokens", "count", "next_token", "alive"):
        same(getattr(found, name), getattr(want, name), name)
    assert int(want.count.max()) <= width
    return want


def check_move(step: Step, there: Step, verdict: Verdict, lens: Tensor, rng: random.Random) -> None:
    """Entries of accepted paths, in a pool of odd shape; nothing else is touched."""
    dummy = step.dummy_page
    shape = rng.randint(1, 2), rng.randint(1, 3), (dummy + 1) * PAGE, rng.choice([16, 20])
    dtype = rng.choice([torch.float32, torch.float16, torch.float64])
    caches = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    dev = there.rows.device
    mine = caches.clone().to(dev)
    paging = {"page_size": PAGE, "dummy_page": dummy}
    definition.move_paths(
        (caches[0], caches[1]), verdict.path, step.rows, lens, step.pages, **paging
    )
    move.move_paths(
        (mine[0], mine[1]), verdict.path.to(dev), there.rows, lens.to(dev), there.pages, **paging
    )
    # The last slot is nobody's: the definition puts there what goes nowhere.
    same(mine[:, :, :, :-1], caches[:, :, :, :-1], "moved entries")


def check_commit(
    step: Step, there: Step, chosen: Selection, cpu: Selection, verdict: Verdict, lens: Tensor
) -> None:
    """The rows' state, what is told to the host, and the paths gathered for drafters."""
    dev = there.rows.device
    moved = Verdict(
        **{
            f.name: x.to(dev)
            for f in fields(verdict)
            if (x := getattr(verdict, f.name)) is not None
        }
    )
    state = [x.clone() for x in (step.lens, step.next_token, step.live)]
    mine = [x.clone() for x in (there.lens, there.next_token, there.live)]
    want = definition.advance(step.tree, cpu, verdict, step.rows, *state)
    with poisoned():
        found = walk.advance(there.tree, chosen, moved, there.rows, *mine)
    for name, a, b in zip(("emitted", "sources", "drafted"), found, want, strict=True):
        same(a, b, name)
    for name, a, b in zip(("lens", "next_token", "live"), mine, state, strict=True):
        same(a, b, name)
    paging = {"page_size": PAGE, "dummy_page": step.dummy_page}
    packed = definition.compact(
        verdict,
        want[0],
        cpu.cu_q,
        step.rows,
        lens,
        step.pages,
        capacity=step.num_tokens,
        **paging,
    )
    with poisoned():
        own = walk.compact(
            moved,
            found[0],
            chosen.cu_q,
            there.rows,
            lens.to(dev),
            there.pages,
            capacity=step.num_tokens,
            **paging,
        )
    names = "token_ids", "next_ids", "positions", "slots", "nodes"
    same(own[0], packed[0], "cu")
    for name, a, b in zip(names, own[1:], packed[1:], strict=True):
        same_and_dead(a, b, name)


def same_and_dead(found: Tensor, want: Tensor, what: str) -> None:
    """What the CPU's definition gives, and dead entries where it has cut them off."""
    same(found[: want.shape[0]], want, what)
    dead = -1 if what == "slots" else 0
    assert bool((found[want.shape[0] :] == dead).all()), f"{what} of dead entries"
