"""The launches that are watched on a GPU (`tools/sanitize.py`), in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.interpreter import linux, passes


@pytest.mark.slow
@linux
def test_small_launches_in_the_interpreter() -> None:
    """They are right, and no kernel is left out."""
    passes("triton_small")
