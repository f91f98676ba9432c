"""Every kernel at sizes of a few rows, compiled: what `tools/sanitize.py` watches."""

from __future__ import annotations

import pytest
import torch

from tests.small_launches import PARTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", list(PARTS))
def test_small_launches(name: str) -> None:
    """They are the definition; under a tool it is the tool that says more."""
    PARTS[name]("cuda")
    torch.cuda.synchronize()
