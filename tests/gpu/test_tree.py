"""A verify step's bookkeeping on a CUDA device: the kernels are the definitions, captured or not."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch

from paceline import ops
from paceline.core.tree import DraftTree, Selection
from paceline.ops.dispatch import implementation
from paceline.ops.triton import move, tree, walk
from tests import tree_grid as grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("seed", range(8))
def test_small_steps(seed: int) -> None:
    """Select, walk, move and commit of any trees: caps, padding, ties, ends, missing pages."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(100):
        grid.run(grid.random_step(rng), rng, "cuda")


@pytest.mark.parametrize("most", [15, 31, 62, 63, 64, 65, 127, 130, 255])
def test_masks_of_many_words(most: int) -> None:
    """Ancestor bits cross words, and the sign bit is a bit like any other."""
    rng = random.Random(most)
    torch.manual_seed(most)
    for _ in range(10):
        grid.run(grid.random_step(rng, most=most, rows=3), rng, "cuda")


@pytest.mark.parametrize("rows, most", [(64, 15), (200, 7), (256, 60)])
def test_large_batches(rows: int, most: int) -> None:
    """Every program counts the rows before its own; up to 16 thousand nodes are ranked."""
    rng = random.Random(rows)
    torch.manual_seed(rows)
    for _ in range(3):
        grid.run(grid.random_step(rng, most=most, rows=rows), rng, "cuda")


def test_a_gpu_has_the_kernels() -> None:
    """What is tested here is what the engine calls."""
    found = {
        name: implementation(name, "cuda", torch.float32)
        for name in ("select", "verify_inputs", "draft_inputs", "judge", "move_paths", "compact")
    }
    assert found == {
        "select": tree.select,
        "verify_inputs": tree.verify_inputs,
        "draft_inputs": tree.draft_inputs,
        "judge": walk.judge,
        "move_paths": move.move_paths,
        "compact": walk.compact,
    }


def rolled(step: grid.Step) -> grid.Step:
    """The same shapes with other contents: each row has its neighbour's tree and cap."""
    made = {f.name: getattr(step.tree, f.name).roll(1, 0).clone() for f in fields(DraftTree)}
    return replace(step, tree=DraftTree(**made), caps=step.caps.roll(1, 0))


def after_select(
    step: grid.Step, chosen: Selection, picks: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Everything that a step computes besides its passes, by whatever its device has."""
    paging = {"page_size": grid.PAGE, "dummy_page": step.dummy_page}
    inputs = ops.verify_inputs(
        step.tree, chosen, step.rows, step.lens, step.pages, **paging, num_pages=step.num_pages
    )
    lens, limits = inputs[3], (step.live, step.stop_ids, step.limits)
    verdict = ops.judge(step.tree, chosen, picks, step.rows, lens, *limits)
    state = step.lens, step.next_token, step.live
    done = ops.advance(step.tree, chosen, verdict, step.rows, *state)
    args = verdict, done[0], chosen.cu_q, step.rows, lens, step.pages
    return (*inputs, *done, *ops.compact(*args, capacity=step.num_tokens, **paging))


@pytest.mark.parametrize("seed", range(12))
def test_replay_is_the_definition(seed: int) -> None:
    """A captured step reads its inputs' memory anew, and leaves the rows' state where it was."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    first = rolled(grid.random_step(rng, most=20, rows=6))
    here = first.to("cuda")
    picks = torch.zeros(first.num_tokens, dtype=torch.int64, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        chosen = ops.select(here.tree, here.rows, here.num_tokens, here.caps)
        return (chosen.node, chosen.cu_q, chosen.mask, *after_select(here, chosen, picks))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    again = rolled(first)
    for field in fields(DraftTree):
        getattr(here.tree, field.name).copy_(getattr(again.tree, field.name))
    for name in ("caps", "lens", "next_token", "live"):
        getattr(here, name).copy_(getattr(again, name))
    tokens = torch.tensor([rng.randrange(grid.VOCAB) for _ in range(first.num_tokens)])
    picks.copy_(tokens)
    for x in out:
        x.fill_(1)
    graph.replay()
    found = [x.cpu() for x in out]

    node, cu_q, mask = found[:3]
    want = grid.reference.select(again.tree, again.rows, again.num_tokens, again.caps)
    live = want.node.shape[0]
    grid.same(cu_q, want.cu_q, "cu_q")
    grid.same(node[:live], want.node, "node")
    grid.same(mask[:live], want.mask, "mask")
    true = after_select(again, Selection(node=node, cu_q=cu_q, mask=mask), tokens)
    for i, (mine, other) in enumerate(zip(found[3:-6], true[:-6], strict=True)):
        grid.same(mine, other, f"output {i}")
    names = "cu", "token_ids", "next_ids", "positions", "slots", "nodes"
    for name, mine, other in zip(names, found[-6:], true[-6:], strict=True):
        grid.same_and_dead(mine, other, name)
    for name in ("lens", "next_token", "live"):
        grid.same(getattr(here, name), getattr(again, name), name)
