"""Drafters: who proposes what the target then verifies.

A registry line is all a new drafter needs; the conformance tests iterate over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.core.registry import Registry

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.draft.base import HostDrafter

DRAFTERS: Registry[Callable[[DraftConfig], HostDrafter]] = Registry(
    "drafter",
    {
        "none": "paceline.draft.none:NoneDrafter",
        "ngram": "paceline.draft.ngram:NgramDrafter",
        "suffix": "paceline.draft.suffix:SuffixDrafter",
    },
)


def build(config: DraftConfig) -> HostDrafter:
    """Build the drafter that `config.method` names.

    Raises:
        ConfigError: no drafter has that name (the message lists them), or a setting of the named
            drafter is out of range.
    """
    return DRAFTERS.get(config.method)(config)
