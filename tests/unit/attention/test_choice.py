"""The choice of an attention backend, and what it says about those it did not take."""

from __future__ import annotations

import pytest
import torch

from paceline import attention
from paceline.attention.reference import ReferenceAttention
from paceline.core.errors import ConfigError
from paceline.core.registry import Registry
from paceline.kv.layout import Heads
from paceline.ops.triton import grid

POOL = (Heads(2, 8), torch.device("cpu"), torch.float32, 16)


class Fussy(ReferenceAttention):
    """Serves pages of 64 only."""

    def refuses(self, layout, device, dtype, page_size):
        return None if page_size == 64 else f"pages of {page_size} are not 64"


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of two: a fussy backend first, the reference second."""
    lines = {
        "fussy": f"{__name__}:Fussy",
        "reference": "paceline.attention.reference:ReferenceAttention",
    }
    monkeypatch.setattr(attention, "BACKENDS", Registry("attention backend", lines))


@pytest.mark.usefixtures("backends")
def test_the_first_that_does_not_refuse_is_taken() -> None:
    """Order is preference; nothing is said where the best one serves."""
    backend, notes = attention.choose(*POOL[:3], 64)
    assert type(backend) is Fussy
    assert notes == ()


@pytest.mark.usefixtures("backends")
def test_a_refusal_is_explained() -> None:
    """A slow fallback must not be a secret: `doctor` and the start-up notes repeat the reason."""
    backend, notes = attention.choose(*POOL)
    assert type(backend) is ReferenceAttention
    assert notes == ("attention backend fussy not used: pages of 16 are not 64; using reference",)
    assert attention.refusals(*POOL) == {"fussy": "pages of 16 are not 64", "reference": None}


@pytest.mark.usefixtures("backends")
def test_a_preference_is_asked_first() -> None:
    """A user may want the definition; one that refuses is replaced with a note."""
    backend, notes = attention.choose(*POOL[:3], 64, prefer="reference")
    assert type(backend) is ReferenceAttention
    assert notes == ()
    backend, notes = attention.choose(*POOL, prefer="fussy")
    assert type(backend) is ReferenceAttention
    assert "fussy not used" in notes[0]


def test_a_backend_that_needs_a_missing_package_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend for a device that is not there must not stop the ones that are."""
    lines = {
        "gone": "paceline.attention.gone:Gone",
        "reference": "paceline.attention.reference:ReferenceAttention",
    }
    monkeypatch.setattr(attention, "BACKENDS", Registry("attention backend", lines))
    for prefer in (None, "gone"):
        backend, notes = attention.choose(*POOL, prefer=prefer)
        assert type(backend) is ReferenceAttention
        assert "gone not used: it can't be imported (No module named" in notes[0]


@pytest.mark.usefixtures("backends")
def test_an_unknown_name_lists_the_known() -> None:
    """A misspelt name is the user's to mend, at once."""
    with pytest.raises(ConfigError, match=r"known attention backends: fussy, reference"):
        attention.choose(*POOL, prefer="flash")


@pytest.mark.usefixtures("backends")
def test_if_all_refuse_all_reasons_are_given() -> None:
    """The error says what each backend could not do, and what to change."""
    with pytest.raises(ConfigError, match=r"not 64.*not a floating-point type.*Choose another"):
        attention.choose(*POOL[:2], torch.int8, 16)


def test_registered_names_are_backends() -> None:
    """A registry line is a string; a wrong one would show only when it is chosen."""
    assert attention.BACKENDS.names()[-1] == "reference"
    for name in attention.BACKENDS:
        backend = attention.BACKENDS.get(name)()
        assert callable(backend.refuses)
        assert callable(backend.plan)
        assert callable(backend.heads)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nobody_serves_eight_bits(dtype: torch.dtype) -> None:
    """A pool has no scales: written as they are, such keys would be wrong without a word."""
    said = attention.refusals(Heads(8, 128), torch.device("cpu"), dtype, 16)
    assert all(said.values()), said
    assert f"not for {dtype}" in str(grid.refusal(dtype, 128))
