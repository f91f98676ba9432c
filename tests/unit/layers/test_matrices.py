from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.layers.embedding import Embedding, Head
from paceline.layers.linear import Linear
from paceline.ops.packed import PackedWeight

PLACE = {"dtype": torch.float64, "device": "cpu"}


class Packed:
    """A packed weight that keeps a plain matrix and counts what it is asked."""

    kind = "a test's"

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.asked: list[str] = []
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.dtype = matrix.dtype
        self.nbytes = 7
        self.kind = "a double"

    def plain(self) -> Tensor | None:
        return self.matrix

    def rows(self, ids: Tensor) -> Tensor:
        self.asked.append("rows")
        return self.matrix[ids]

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.asked.append("matmul")
        y = x @ self.matrix.T
        return y if bias is None else y + bias

    def matmul_f32(self, x: Tensor) -> Tensor:
        self.asked.append("matmul_f32")
        return x @ self.matrix.T


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_fused_parts_lie_one_after_the_other() -> None:
    """A fused projection is its parts' outputs side by side, bias included."""
    fused = Linear(8, 6, 2, 2, bias=True, **PLACE)
    weights, biases = [random(n, 8) for n in (6, 2, 2)], [random(n) for n in (6, 2, 2)]
    fused.set_weight(torch.cat(weights))
    fused.bias = torch.nn.Parameter(torch.cat(biases))
    x = random(3, 8)
    parts = fused(x).split(fused.splits, dim=-1)
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        torch.testing.assert_close(part, x @ weight.T + bias)


def test_packed_weights_take_the_place_of_parameters() -> None:
    """A packed weight serves the product, holds no parameter beside it, and can be replaced again."""
    linear = Linear(8, 5, **PLACE)
    packed = Packed(random(5, 8))
    assert isinstance(packed, PackedWeight)
    linear.set_weight(packed)
    x = random(2, 8)
    torch.testing.assert_close(linear(x), x @ packed.matrix.T)
    assert packed.asked == ["matmul"]
    assert list(linear.parameters()) == []
    assert linear.nbytes == 7
    assert "Packed" in repr(linear)
    linear.set_weight(torch.zeros(5, 8, dtype=torch.float64))
    assert not linear(x).any()
    assert linear.nbytes == 5 * 8 * 8
    assert [name for name, _ in linear.named_parameters()] == ["weight"]


def test_a_weight_of_another_shape_is_our_own_bug() -> None:
    """Nothing is broadcast by accident."""
    with pytest.raises(AssertionError, match=r"\[N, K\]"):
        Linear(8, 5, **PLACE).set_weight(torch.zeros(5, 1))


@pytest.mark.parametrize("packed", [False, True])
def test_a_tied_table_serves_both_ends(packed: bool) -> None:
    """One table, packed or not, looks tokens up and makes logits."""
    table = Embedding(7, 4, **PLACE)
    matrix = random(7, 4)
    table.set_weight(Packed(matrix) if packed else matrix)
    ids = torch.tensor([3, 0, 3, 6])
    torch.testing.assert_close(table(ids), matrix[ids])
    torch.testing.assert_close(table.logits(random(2, 4)), random(2, 4) @ matrix.T)
    if packed:
        assert table.weight.asked == ["rows", "matmul_f32"]


def test_logits_are_float32_for_half_precision() -> None:
    """Logits never have fewer bits than float32: ties would be made up by rounding."""
    head = Head(9, 4, dtype=torch.bfloat16, device="cpu")
    head.set_weight(random(9, 4).bfloat16())
    assert head(random(2, 4).bfloat16()).dtype == torch.float32
