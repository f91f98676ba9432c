"""Block maxima and the log of exponentials' sum: the own kernel against the definition."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.cpu import peaks as own
from paceline.ops.cpu.native import native
from paceline.ops.dispatch import implementation
from paceline.ops.reference import peaks as reference

INF = float("inf")
pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")


@pytest.mark.parametrize("shape", [(7, 49_152), (1, 64), (3, 2_112), (2, 3, 8_192), (0, 128)])
def test_equal_to_the_definition(shape: tuple[int, ...]) -> None:
    """Maxima exactly, the logarithm to rounding; masked numbers among them."""
    x = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[..., 3::7] = -INF
    maxima, mass = own.peaks(x)
    wanted, log = reference.peaks(x)
    assert torch.equal(maxima, wanted)
    torch.testing.assert_close(mass, log, rtol=1e-6, atol=1e-5)


def test_infinities() -> None:
    """Nothing but -inf weighs nothing; an infinity outweighs all."""
    x = torch.full((2, 4_096), -INF)
    x[1, 2_500] = INF
    assert own.peaks(x)[1].tolist() == [-INF, INF]


def test_strides_and_other_dtypes() -> None:
    """A transposed matrix is copied; float64 goes to the definition."""
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).t()
    assert torch.equal(own.peaks(x)[0], reference.peaks(x.contiguous())[0])
    wide = torch.randn(2, 128, dtype=torch.float64)
    chosen = implementation("peaks", "cpu", torch.float64)
    assert torch.equal(chosen(wide)[1], wide.logsumexp(-1))
