from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.tree import NOT_FINITE
from paceline.sample.options import SamplingTable
from paceline.sample.sampler import (
    PickNodes,
    Picks,
    choose,
    choose_host,
    pick,
    pick_by,
    pick_on_device,
)

V = 1003  # odd, so that rows of a matrix start at unaligned addresses
MIXES = {
    "greedy": SamplingParams(temperature=0),
    "T1": SamplingParams(temperature=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k": SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "bias": SamplingParams(temperature=0, logit_bias={5: 4.0, 900: 3.0}, banned_token_ids=[7]),
    "min_tokens": SamplingParams(temperature=0.5, min_tokens=50),
    "logprobs": SamplingParams(temperature=1, logprobs=5),
}


def table_of(params: list[SamplingParams]) -> SamplingTable:
    table = SamplingTable(len(params), V, "cpu", len(params))
    for row, p in enumerate(params):
        table.assign(
            row,
            p,
            seed=row,
            sample_index=0,
            prompt_ids=[1, 2, 3],
            output_ids=[row % V],
            stop_ids=[2],
            limit=10**6,
        )
    return table


def nodes_of(rows: list[int]) -> PickNodes:
    return PickNodes(
        rows=torch.tensor(rows),
        positions=torch.tensor([4 + r % 3 for r in rows]),
        num_output=torch.tensor([1 + r % 3 for r in rows]),
        path_tokens=torch.tensor([[r % V, -1] for r in rows]),
        allowed=None,
        host_rows=sorted(set(rows)),
    )


def identity(hidden: Tensor) -> Tensor:
    return hidden


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bit by bit, NaN included."""
    if a is None or b is None:
        return a is b
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [choose, choose_host])
def test_a_row_does_not_depend_on_its_company(way: type[choose], dtype: torch.dtype) -> None:
    """Batch invariance of the sampler: 1, 8 and 128 rows, every mix of options, bit by bit."""
    rng = random.Random(3)
    names = list(MIXES)
    params = [MIXES[names[i % len(names)]] for i in range(128)]
    table = table_of(params)
    logits = torch.randn(128, V, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 3
    logits[::5] = (logits[::5] * 2).round() / 2  # ties
    whole = way(logits, nodes_of(list(range(128))), table)
    for size in (1, 8):
        for _ in range(24 // size):
            rows = rng.sample(range(128), size)
            part = way(logits[rows], nodes_of(rows), table)
            assert part.tokens.tolist() == whole.tokens[rows].tolist()
            asks = [i for i, r in enumerate(rows) if params[r].logprobs is not None]
            for i in asks:
                assert part.logprobs is not None
                assert part.top_ids is not None
                assert part.top_logprobs is not None
                assert whole.logprobs is not None
                assert whole.top_ids is not None
                assert whole.top_logprobs is not None
                assert float(part.logprobs[i]) == float(whole.logprobs[rows[i]])
                assert torch.equal(part.top_ids[i], whole.top_ids[rows[i]])
                assert torch.equal(part.top_logprobs[i], whole.top_logprobs[rows[i]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_quick_way_is_the_definition(dtype: torch.dtype) -> None:
    """A CPU picks row by row; its tokens and log-probabilities are those of the definition."""
    params = [MIXES[name] for name in MIXES] * 8
    table = table_of(params)
    nodes = nodes_of(list(range(len(params))))
    for seed in range(4):
        gen = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(params), V, dtype=dtype, generator=gen) * 3
        if seed % 2:
            logits = (logits * 4).round() / 4
        a, b = choose(logits, nodes, table), choose_host(logits, nodes, table)
        assert torch.equal(a.tokens, b.tokens)
        assert same(a.top_ids, b.top_ids)
        for x, y in ((a.logprobs, b.logprobs), (a.top_logprobs, b.top_logprobs)):
            assert x is not None
            assert y is not None
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_chunks_are_put_together_in_order() -> None:
    """More positions than a chunk holds: every field of every position arrives, and in place."""
    rows = [r % 7 for r in range(300)]
    table = table_of([MIXES["logprobs"]] * 4 + [MIXES["penalties"]] * 3)
    hidden = torch.randn(300, V)
    sizes = []

    def head(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x

    for way in (choose, choose_host):
        many = pick_by(way, hidden, head, nodes_of(rows), table)
        for i in (0, 127, 128, 255, 256, 299):
            one = pick_by(way, hidden[i : i + 1], identity, nodes_of(rows[i : i + 1]), table)
            assert int(many.tokens[i]) == int(one.tokens[0])
            if one.logprobs is not None:
                assert many.logprobs is not None
                assert float(many.logprobs[i]) == float(one.logprobs[0])
                assert many.top_ids is not None
                assert same(many.top_ids[i], one.top_ids[0] if one.top_ids is not None else None)
    assert sizes == [128, 128, 44] * 2
    on_device = pick_on_device(hidden, head, nodes_of(rows), table)
    assert torch.equal(on_device.tokens, many.tokens)
    assert pick(hidden[:0], identity, nodes_of([]), table).tokens.shape == (0,)


def test_logprobs_are_those_of_the_unprocessed_logits() -> None:
    """What a user scores must be the model's law, whatever temperature and bias chose the token."""
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={9: 100.0}, logprobs=20)
    table = table_of([params, SamplingParams(logprobs=0), SamplingParams()])
    logits = torch.randn(3, V, dtype=torch.float64)
    logits[0, 100:140] = 4.0  # more equal best tokens than are asked for
    want = torch.log_softmax(logits, dim=1)
    for way in (choose, choose_host):
        got: Picks = way(logits, nodes_of([0, 1, 2]), table)
        assert got.logprobs is not None
        assert got.top_ids is not None
        assert got.top_logprobs is not None
        assert int(got.tokens[0]) == 9
        for row in (0, 1):
            token = int(got.tokens[row])
            torch.testing.assert_close(got.logprobs[row], want[row, token], rtol=0, atol=1e-12)
        order = sorted(range(V), key=lambda t: (-float(logits[0, t]), t))[:20]
        assert got.top_ids[0].tolist() == order
        torch.testing.assert_close(got.top_logprobs[0], want[0, order], rtol=0, atol=1e-12)
        assert got.logprobs[2].isnan()
        assert (got.top_ids[2] == -1).all()


@pytest.mark.parametrize("way", [choose, choose_host])
def test_equal_logits_give_the_lowest_id(way: type[choose]) -> None:
    """A tie must not depend on the library's reduction order."""
    table = table_of([SamplingParams(temperature=0), MIXES["bias"]])
    logits = torch.zeros(2, V)
    logits[0, [5, 40, 1002]] = 1.0
    logits[1, [100, 300]] = 4.0  # token 5's bias makes it equal to these, and it is the first
    assert way(logits, nodes_of([0, 1]), table).tokens.tolist() == [5, 5]


@pytest.mark.parametrize("way", [choose, choose_host])
@pytest.mark.parametrize("broken", ["nan", "inf", "-inf", "one nan"])
def test_a_broken_row_has_no_token_and_harms_nobody(way: type[choose], broken: str) -> None:
    """A NaN from the model ends its own request only, whatever its options hide of it."""
    params = [MIXES[name] for name in MIXES]
    mates = [SamplingParams(temperature=0, logprobs=5)]
    table = table_of([*params, *params, *mates])
    n = len(params)
    logits = torch.randn(2 * n + 1, V) * 3
    good = way(logits, nodes_of(list(range(2 * n + 1))), table)
    if broken == "one nan":
        logits[:n, 17] = torch.nan
    else:
        logits[:n] = float(broken)
    got = way(logits, nodes_of(list(range(2 * n + 1))), table)
    assert (got.tokens[:n] == NOT_FINITE).all()
    assert torch.equal(got.tokens[n:], good.tokens[n:])
    assert got.top_ids is not None
    assert (got.top_ids < V).all()
    for a, b in (
        (got.logprobs, good.logprobs),
        (got.top_ids, good.top_ids),
        (got.top_logprobs, good.top_logprobs),
    ):
        assert a is not None
        assert b is not None
        assert same(a[n:], b[n:])


def test_temperatures_near_zero_are_greedy_not_infinite() -> None:
    """1e-30 is a legal temperature; dividing float32 logits by it gives only infinities."""
    table = table_of([SamplingParams(temperature=1e-30), SamplingParams(temperature=1e-320)])
    logits = torch.randn(2, V) * 50
    for way in (choose, choose_host):
        got = way(logits, nodes_of([0, 1]), table)
        assert torch.equal(got.tokens, logits.argmax(1))


def test_a_head_that_tracks_gradients_can_be_picked_from() -> None:
    """Training evaluates with the serving pick; its weights require gradients."""
    weight = torch.randn(V, 4, requires_grad=True)
    table = table_of([MIXES["top_p"], MIXES["greedy"]])
    got = pick(torch.randn(2, 4), lambda h: h @ weight.T, nodes_of([0, 1]), table)
    assert got.tokens.shape == (2,)
