"""The pick's Triton kernels, compiled: the definition's tokens, eager and replayed, at real sizes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.tree import NOT_FINITE
from paceline.ops.dispatch import explain
from paceline.sample.device import choose_by_kernels
from paceline.sample.noise import gumbel, hash_tokens, noise_words_of
from paceline.sample.sampler import PickNodes, Picks, choose, pick_on_device
from tests import pick_grid as grid
from tests.gpu_capture import captured
from tests.oracle.goodness import chi2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SIZES = (97, 1003, 49_152, 152_064)


def test_the_kernels_are_chosen() -> None:
    """Nothing below would test them otherwise."""
    for op in ("pick", "largest"):
        assert next(c for c in explain(op, "cuda", torch.float32) if c.chosen).name == "triton"


@pytest.mark.parametrize("kind", grid.KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_the_definition_s(size: int, kind: str) -> None:
    """All kinds of logits and options in one launch, from one row to three hundred."""
    rng = random.Random(size)
    for count in (1, 13, 64, 300 if size < 50_000 else 100):  # the definition takes much memory
        params = grid.mixed(grid.MIX, count)
        rng.shuffle(params)
        table = grid.table_of(params, size, "cuda")
        for seed in range(3 if size < 50_000 else 1):
            nodes = grid.nodes_of(list(range(count)), "cuda", seed)
            logits = grid.logits_of(kind, count, size, seed).cuda()
            found = choose_by_kernels(logits, nodes, table).tokens
            assert not grid.differences(found, logits, nodes, table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [97, 49_152])
def test_logits_of_16_bits(size: int, dtype: torch.dtype) -> None:
    """Read as they are; thousands of ties go to the lowest ids."""
    table = grid.table_of(grid.mixed(grid.MIX, 52), size, "cuda")
    nodes = grid.nodes_of(list(range(52)), "cuda")
    for kind in grid.KINDS:
        logits = grid.logits_of(kind, 52, size, 1).to(dtype).cuda()
        found = choose_by_kernels(logits, nodes, table).tokens
        assert not grid.differences(found, logits, nodes, table)


@pytest.mark.parametrize("params", grid.MIX, ids=str)
def test_each_option_alone(params: SamplingParams) -> None:
    """Kernels that a step leaves out must not be missed."""
    table = grid.table_of([params] * 40, 5000, "cuda")
    nodes = grid.nodes_of(list(range(40)), "cuda")
    for kind in grid.KINDS:
        logits = grid.logits_of(kind, 40, 5000, 4).cuda()
        found = choose_by_kernels(logits, nodes, table).tokens
        assert not grid.differences(found, logits, nodes, table)


def test_edited_logits() -> None:
    """Masks, bias, penalties and bans; a fault that an option hides counts all the same."""
    params = grid.mixed(grid.EDITED + grid.MIX, 90)
    table = grid.table_of(params, 1003, "cuda")
    nodes = grid.nodes_of(list(range(90)), "cuda")
    for kind in grid.KINDS:
        logits = grid.logits_of(kind, 90, 1003, 6).cuda()
        banned = [i for i, p in enumerate(params) if p.banned_token_ids]
        logits[banned[0], 7] = math.nan
        found = choose_by_kernels(logits, nodes, table).tokens
        assert int(found[banned[0]]) == NOT_FINITE
        assert not grid.differences(found, logits, nodes, table)


def test_noise_is_the_reference_s() -> None:
    """Words and uniforms bit by bit; its logarithms within a few steps of float32."""
    from tests.pick_noise import noise_of

    gen = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (50,), generator=gen).cuda()
    positions = torch.randint(0, 1 << 20, (50,), generator=gen).cuda()
    words, values, noise = noise_of(keys, positions, 200_000)
    want = noise_words_of(keys, positions)
    assert torch.equal(words, want)
    bits = hash_tokens(torch.arange(200_000, dtype=torch.int32, device="cuda"), want)
    v = ((bits.view(torch.uint32).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.equal(values, v)
    exact = -torch.log(-torch.log1p(-v.double()))
    torch.testing.assert_close(noise.double(), exact, rtol=2.0**-21, atol=2.0**-21)
    torch.testing.assert_close(noise, gumbel(bits, torch.float32), rtol=2.0**-21, atol=2.0**-21)


def test_a_row_does_not_depend_on_its_company() -> None:
    """Tokens and log-probabilities of a row are the same bits alone and among others."""
    params = grid.mixed(grid.MIX + grid.SCORED, 128)
    table = grid.table_of(params, 49_152, "cuda")
    logits = grid.logits_of("ties", 128, 49_152, 3).cuda()
    whole = choose_by_kernels(logits, grid.nodes_of(list(range(128)), "cuda"), table)
    assert whole.logprobs is not None
    rng = random.Random(0)
    for size in (1, 8, 64):
        rows = rng.sample(range(128), size)
        part: Picks = choose_by_kernels(logits[rows], grid.nodes_of(rows, "cuda"), table)
        assert torch.equal(part.tokens, whole.tokens[rows])
        if part.logprobs is not None:
            assert torch.equal(part.logprobs.nan_to_num(), whole.logprobs[rows].nan_to_num())


def test_log_probabilities() -> None:
    """Of unprocessed logits, for rows that ask; the others have none."""
    for kind in ("ties", "steep", "masked"):
        table = grid.table_of(grid.mixed(grid.SCORED, 30), 49_152, "cuda")
        nodes = grid.nodes_of(list(range(30)), "cuda")
        logits = grid.logits_of(kind, 30, 49_152, 2).cuda()
        found, want = choose_by_kernels(logits, nodes, table), choose(logits, nodes, table)
        assert torch.equal(found.tokens, want.tokens)
        assert found.top_ids is not None
        assert want.top_ids is not None
        assert torch.equal(found.top_ids, want.top_ids)
        for name in ("logprobs", "top_logprobs"):
            torch.testing.assert_close(
                getattr(found, name), getattr(want, name), rtol=0, atol=4e-6, equal_nan=True
            )


@pytest.mark.parametrize("params", [grid.MIX, grid.MIX + grid.EDITED, grid.MIX + grid.SCORED])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_replay_serves_what_stands_in_the_table(params: list[SamplingParams]) -> None:
    """Captured once; rows change hands, options, positions and logits, within the options in play."""
    count, size = 3 * len(params), 2000
    now = grid.mixed(params, count)
    table = grid.table_of(now, size, "cuda")
    rows = list(range(count))
    nodes = grid.nodes_of(rows, "cuda")
    logits = grid.logits_of("steep", count, size, 0).cuda()
    graph, picks = captured(lambda: choose_by_kernels(logits, nodes, table))
    rng = random.Random(5)
    for turn in range(6):
        rng.shuffle(now)
        for row in rows:
            table.release(row)
        for row, given in zip(rows, now, strict=True):
            grid.put(table, row, given)
        table.apply()
        nodes.positions.copy_(grid.nodes_of(rows, "cuda", turn).positions)
        logits.copy_(grid.logits_of(grid.KINDS[turn], count, size, turn))
        picks.tokens.fill_(-7)
        graph.replay()
        replayed = picks.tokens.clone()
        again = choose_by_kernels(logits, nodes, table)
        assert torch.equal(replayed, again.tokens), "replay and eager are the same kernels"
        assert not grid.differences(replayed, logits, nodes, table)
        if picks.logprobs is not None:
            assert again.logprobs is not None
            assert torch.equal(picks.logprobs.nan_to_num(), again.logprobs.nan_to_num())


def test_more_rows_than_a_chunk() -> None:
    """Through the head, in chunks of 256 MiB of logits: every position arrives, and in place."""
    size, count = 152_064, 1000
    table = grid.table_of(grid.mixed(grid.MIX, count), size, "cuda")
    weight = torch.randn(16, size, device="cuda")
    hidden = torch.randn(count, 16, device="cuda")
    nodes = grid.nodes_of(list(range(count)), "cuda")
    seen: list[int] = []

    def head(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x @ weight

    found = pick_on_device(hidden, head, nodes, table).tokens
    assert seen == [441, 441, 118]
    for start in (0, 440, 441, 881, 882, 980):
        some = slice(start, start + 20)
        part = PickNodes(
            rows=nodes.rows[some],
            positions=nodes.positions[some],
            num_output=nodes.num_output[some],
            path_tokens=nodes.path_tokens[some],
            allowed=None,
            host_rows=nodes.host_rows,
        )
        # The product's bits depend on how many rows it has.
        differ = found[some] != choose(hidden[some] @ weight, part, table).tokens
        assert int(differ.sum()) <= 2


def test_emitted_tokens_have_the_law_of_the_logits() -> None:
    """A hundred thousand draws, plain and filtered; a slightly warmer law is rejected."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(7)) * 2
    n = 4000
    for params in (SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.8)):
        table = grid.table_of([params] * n, 50, "cuda")
        seen: list[object] = []
        for seed in range(25):
            nodes = grid.nodes_of(list(range(n)), "cuda", seed)
            seen += choose_by_kernels(logits.cuda().expand(n, -1), nodes, table).tokens.tolist()
        ranked = torch.softmax(logits, 0).sort(descending=True)
        kept = 50 if params.top_k <= 0 else params.top_k
        if params.top_p < 1:
            kept = int((ranked.values.cumsum(0) - ranked.values < params.top_p).sum())
        ids: list[int] = ranked.indices[:kept].tolist()
        for heat, fits in ((1.0, True), (1.2, False)):
            law = torch.softmax(logits[ids] / heat, 0).tolist()
            off = chi2(seen, dict(zip(ids, law, strict=True)), len(seen))
            assert abs(off) < 5 if fits else off > 20
