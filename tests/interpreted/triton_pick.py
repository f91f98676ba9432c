"""The pick's kernels in Triton's interpreter, on the CPU; run by tests/unit/ops/test_triton_pick.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.tree import NOT_FINITE
from paceline.ops.triton import pick as kernels
from paceline.ops.triton import pick_kernels
from paceline.ops.triton.peaks import log_sum_exp
from paceline.ops.triton.pick import Tiling
from paceline.sample.device import choose_by_kernels
from paceline.sample.noise import gumbel, hash_tokens, noise_words_of
from paceline.sample.sampler import choose
from tests import pick_grid as grid
from tests.oracle.goodness import chi2
from tests.pick_noise import noise_of

# Every way that a row can take: a list, rounds of parts, alone.
LISTS = Tiling(block=64, part=128, room=64, most_k=32, walk_block=128)
FULL_LISTS = Tiling(block=128, part=128, room=4, most_k=32, rounds=1, walk_block=64)
ALONE = Tiling(block=256, part=1024, most_k=0, rounds=0, walk_block=256)


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


def use(tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "tiling_for", lambda *_: tiling)
    monkeypatch.setattr(kernels, "_processors", lambda _: 1)


@pytest.mark.parametrize("kind", grid.KINDS)
@pytest.mark.parametrize(
    "tiling, size", [(LISTS, 300), (FULL_LISTS, 97), (ALONE, 97)], ids=["lists", "full", "alone"]
)
def test_tokens_are_the_definition_s(
    kind: str, tiling: Tiling, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of logits and options in one launch, whichever way a row takes."""
    use(tiling, monkeypatch)
    rows = len(grid.MIX)
    table = grid.table_of(grid.MIX, size, "cpu")
    nodes = grid.nodes_of(list(range(rows)), "cpu")
    logits = grid.logits_of(kind, rows, size, seed=grid.KINDS.index(kind))
    found = choose_by_kernels(logits, nodes, table).tokens
    assert not grid.differences(found, logits, nodes, table)


def test_edited_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, bias, penalties, bans of more stop ids than columns: a fault that they hide counts."""
    use(LISTS, monkeypatch)
    table = grid.table_of(grid.mixed(grid.EDITED, 10), 130, "cpu")
    nodes = grid.nodes_of(list(range(10)), "cpu")
    logits = grid.logits_of("steep", 10, 130, seed=3)
    logits[6, 7] = math.nan  # banned there
    found = choose_by_kernels(logits, nodes, table).tokens
    assert int(found[6]) == NOT_FINITE
    assert not grid.differences(found, logits, nodes, table)


def test_one_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts and cells: offsets and borders of a real size, and bfloat16 with its many ties."""
    use(Tiling(block=2048, part=8192), monkeypatch)
    params = [grid.MIX[i] for i in (0, 1, 2, 3)]
    table = grid.table_of(params, 49_152, "cpu")
    nodes = grid.nodes_of(list(range(4)), "cpu")
    logits = grid.logits_of("steep", 4, 49_152, seed=5).bfloat16()
    found = choose_by_kernels(logits, nodes, table).tokens
    assert not grid.differences(found, logits, nodes, table)


def test_noise_is_the_reference_s() -> None:
    """Words and uniforms bit by bit; its logarithms within a few steps of float32."""
    gen = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (3,), generator=gen)
    positions = torch.tensor([0, 5, 1_000_003])
    words, values, noise = noise_of(keys, positions, 5000)
    want = noise_words_of(keys, positions)
    assert torch.equal(words, want)
    bits = hash_tokens(torch.arange(5000, dtype=torch.int32), want)
    v = ((bits.view(torch.uint32).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.equal(values, v)
    exact = -torch.log(-torch.log1p(-v.double()))
    torch.testing.assert_close(noise.double(), exact, rtol=2.0**-21, atol=2.0**-21)
    torch.testing.assert_close(noise, gumbel(bits, torch.float32), rtol=2.0**-21, atol=2.0**-21)


def test_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unprocessed logits, for rows that ask; the others have none."""
    use(LISTS, monkeypatch)
    table = grid.table_of(grid.SCORED, 97, "cpu")
    nodes = grid.nodes_of([0, 1, 2], "cpu")
    logits = grid.logits_of("ties", 3, 97, seed=2)
    found, want = choose_by_kernels(logits, nodes, table), choose(logits, nodes, table)
    assert torch.equal(found.tokens, want.tokens)
    assert found.top_ids is not None
    assert want.top_ids is not None
    assert torch.equal(found.top_ids, want.top_ids)
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(
            getattr(found, name), getattr(want, name), rtol=0, atol=2e-6, equal_nan=True
        )


def draws(logits: Tensor, params: SamplingParams, n: int) -> list[object]:
    """Tokens of n requests that differ in their seeds only."""
    table = grid.table_of([params] * n, len(logits), "cpu")
    nodes = grid.nodes_of(list(range(n)), "cpu")
    return list(choose_by_kernels(logits.expand(n, -1), nodes, table).tokens.tolist())


def test_emitted_tokens_have_the_law_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the right shape and independent of the token; a warmer law is rejected."""
    use(Tiling(block=64, part=64), monkeypatch)
    logits = torch.randn(50, generator=torch.Generator().manual_seed(7)) * 2
    n = 400
    seen = draws(logits, SamplingParams(), n)
    laws = [dict(enumerate(torch.softmax(logits / t, 0).tolist())) for t in (1.0, 2.0)]
    assert abs(chi2(seen, dict(laws[0]), n)) < 5
    assert chi2(seen, dict(laws[1]), n) > 20


def test_infinities_and_faults() -> None:
    """Nothing but -inf weighs nothing; an infinity outweighs all; a NaN spoils its row."""
    x = torch.full((4, 5000), -math.inf)
    x[1, 2500] = math.inf
    x[1, 2501] = 3.0
    x[2, :] = -200.0
    x[3, 0::2] = 1.0
    x[3, 4500] = math.nan
    about, rest = log_sum_exp(x)
    assert (about + rest)[:2].tolist() == [-math.inf, math.inf]
    assert math.isclose(float((about + rest)[2]), math.log(5000) - 200, rel_tol=1e-6)
    assert math.isnan(float((about + rest)[3]))


def test_constants_agree() -> None:
    """Device code cannot read them from where they are defined."""
    assert pick_kernels.NOT_FINITE.value == NOT_FINITE
