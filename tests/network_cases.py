"""What every test over drafter networks runs through: networks alone, as trees, and merged with others.

A case is a drafter's name and engine options. A new registry line is a new case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.draft import COMPOSITES, NETWORKS
from tests import tiny_drafters


def network_cases() -> list[tuple[str, Mapping[str, Any]]]:
    """Every network, its variants, and what is made of one and others: method and engine options."""
    return [
        *((name, {}) for name in NETWORKS.names()),
        *tiny_drafters.VARIANTS,
        *((name, parts) for name in COMPOSITES for parts in tiny_drafters.NETWORK_PARTS[name]),
    ]


def network_in(name: str, own: Mapping[str, Any]) -> str:
    """The one network of a case, alone or as a part."""
    (network,) = [part for part in own.get("parts", [name]) if part in NETWORKS]
    return str(network)


def case_id(name: str, own: Mapping[str, Any]) -> str:
    """A case in a test's name."""
    parts = "+".join(own.get("parts", ()))
    rest = (f"{k}={v}" for k, v in own.items() if k != "parts")
    return "-".join(filter(None, [name, parts, *rest]))
