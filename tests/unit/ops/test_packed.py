"""Groups, quantisation, and what `pack` makes of a matrix in each mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import ops
from paceline.ops import Groups, PackedWeight, quantize
from paceline.ops.cpu.native import native


def weight(n: int = 48, k: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_is_within_half_a_step(bits: int) -> None:
    """Codes are the nearest ones; scales rounded to float16 cost no more than a little."""
    exact = weight()
    held = quantize(exact, bits=bits)
    off = (held.dequantize(torch.float32) - exact).abs().view(48, 2, 32)
    assert (off <= held.scales.float().unsqueeze(-1) * 0.51).all()
    assert held.codes.amax() <= (15 if bits == 4 else 127)


def test_a_constant_group_is_exact() -> None:
    """No step, no division by zero."""
    for bits in (4, 8):
        held = quantize(torch.full((2, 32), 0.5), bits=bits)
        assert torch.allclose(held.dequantize(torch.float32), torch.full((2, 32), 0.5), atol=1e-3)
        assert (quantize(torch.zeros(2, 32), bits=bits).dequantize(torch.float32) == 0).all()


def test_what_can_not_be_grouped_is_refused() -> None:
    """The message names the shape and the group size."""
    with pytest.raises(ValueError, match=r"cannot quantise \[48, 40\] to 4 bits in groups of 32"):
        quantize(weight(k=40), bits=4)
    with pytest.raises(ValueError, match="to 5 bits"):
        quantize(weight(), bits=5)


def test_rows_are_stacked_cut_and_permuted_as_values_are() -> None:
    """Fused projections and permuted heads: the same as doing it to the dequantised matrix."""
    a, b = quantize(weight(), bits=4), quantize(weight(seed=1), bits=4)
    both = Groups.cat_rows([a, b])
    dense = torch.cat([a.dequantize(torch.float64), b.dequantize(torch.float64)])
    assert torch.equal(both.dequantize(torch.float64), dense)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2))
    assert torch.equal(both.permute_rows(order).dequantize(torch.float64), dense[order])
    assert both.shape == (96, 64)
    assert both.nbytes == 96 * 64 // 2 + 2 * 96 * 2 * 2


def test_parts_without_mins_are_stacked_with_zeros() -> None:
    """A part whose min is nothing joins one that has some."""
    a = quantize(weight(), bits=4)
    b = Groups(codes=a.codes, scales=a.scales, mins=None, size=32, bits=4)
    both = Groups.cat_rows([b, a])
    assert torch.equal(both.dequantize(torch.float64)[:48], b.dequantize(torch.float64))
    with pytest.raises(ValueError, match="different kinds"):
        Groups.cat_rows([a, quantize(weight(), bits=8)])


def test_dequantised_is_rounded_once() -> None:
    """bfloat16 comes from float32, not from float16 scales times codes in float16."""
    held = quantize(weight(), bits=4)
    assert torch.equal(held.dequantize(torch.bfloat16), held.dequantize(torch.float32).bfloat16())


@pytest.mark.parametrize("mode", ["auto", "bf16", "4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_mode_multiplies(mode: ops.packed.WeightMode, dtype: torch.dtype) -> None:
    """Each mode of each matrix gives its own values' product; the file's codes are never rounded."""
    x = weight(5, 64, seed=3).to(dtype)
    q41 = quantize(weight(), bits=4)
    rounding = {"4bit": 0.11, "8bit": 0.012}.get(mode, 0.005)
    for given in (weight(), q41, quantize(weight(), bits=8)):
        held = ops.pack(given, mode, dtype)
        exact = given.dequantize(torch.float64) if isinstance(given, Groups) else given.double()
        exact = x.double() @ exact.T
        found = ops.linear(x, held)
        assert found.dtype == dtype
        limit = 0.012 if isinstance(given, Groups) else rounding
        assert (found.double() - exact).norm() <= limit * exact.norm()
        assert ops.linear_f32(x, held).dtype == (
            torch.float64 if dtype == torch.float64 else torch.float32
        )


def test_auto_keeps_what_the_file_has() -> None:
    """Groups stay groups with 16-bit activations; float32 activations get float32 arithmetic."""
    held = ops.pack(quantize(weight(), bits=4), "auto", torch.bfloat16)
    assert isinstance(held, PackedWeight)
    assert "4-bit" in held.kind
    wide = ops.pack(quantize(weight(), bits=4), "auto", torch.float32)
    assert isinstance(wide, Tensor) or "float32" in wide.kind


def test_a_width_that_no_group_divides_stays_plain() -> None:
    """`--weights 4bit` on an odd model packs what it can."""
    held = ops.pack(weight(k=40).bfloat16(), "4bit", torch.bfloat16)
    plain = held if isinstance(held, Tensor) else held.plain()
    assert plain is not None
    assert torch.equal(plain, weight(k=40).bfloat16())


def test_packed_weights_are_told_apart_from_tensors() -> None:
    """`linear` dispatches on it: a tensor is never taken for a packed weight."""
    if native() is None:
        pytest.skip("no own kernels: nothing is packed")
    held = ops.pack(weight().bfloat16(), "auto", torch.bfloat16)
    assert isinstance(held, PackedWeight)
    assert not isinstance(held, Tensor)
