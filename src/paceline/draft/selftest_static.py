"""What a drafter's configuration alone says about whether it belongs to a target. Cheap; at every load.

A *fault* ends the loading. A *warning* is something that costs acceptance with most drafters. A *note* is
worth knowing where a drafter disappoints. Tensors and vocabulary maps are checked where they are read
(`models/weights.py`, `eagle3_vocabulary.py`); how well it drafts is `selftest.py`'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.draft.base import TargetInfo
    from paceline.draft.dflash_config import DFlashConfig
    from paceline.draft.eagle3_config import Eagle3Config

log = logging.getLogger(__name__)

Level = Literal["fault", "warning", "note"]
_ZERO = 1e-6  # largest number of an embedding that says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a drafter, in words."""

    level: Level
    text: str


def dflash_findings(config: DFlashConfig, target: TargetInfo) -> list[Finding]:
    """Sizes, vocabulary, layers and taps, the mask's embedding, the length it was made for."""
    facts = target.config
    found = _unequal(
        ("hidden size", config.hidden_size, facts.hidden_size),
        ("size of the target's features", config.target_hidden_size, facts.hidden_size),
        ("vocabulary", config.vocab_size, facts.vocab_size),
        ("number of target layers", config.num_target_layers, facts.num_layers),
    )
    if config.mask_token_id >= facts.vocab_size:
        found.append(
            Finding(
                level="fault",
                text=f"mask token {config.mask_token_id} is beyond the target's "
                f"{facts.vocab_size} tokens",
            )
        )
    else:
        row = target.embed(torch.tensor([config.mask_token_id], device=target.device))
        if float(row.abs().max()) < _ZERO:
            found.append(
                Finding(
                    level="warning",
                    text=f"the target's embedding of the mask token {config.mask_token_id} is zero, "
                    "so the drafter cannot tell a mask from nothing; expect few accepted tokens "
                    "unless it was trained so. Check mask_token_id.",
                )
            )
    return [*found, *_taps(config.target_layer_ids, target), *_length(config.max_position, target)]


def eagle3_findings(config: Eagle3Config, target: TargetInfo) -> list[Finding]:
    """Sizes, vocabulary and taps, the length it was made for."""
    facts = target.config
    found = _unequal(
        ("size of the target's features", config.target_hidden_size, facts.hidden_size),
        ("vocabulary", config.vocab_size, facts.vocab_size),
    )
    return [*found, *_taps(config.aux_layers, target), *_length(config.max_position, target)]


def enforce(findings: Sequence[Finding], folder: Path) -> None:
    """Refuse a drafter with faults; log the rest.

    Raises:
        ConfigError: it was made for another target; all faults are listed.
    """
    faults = [finding.text for finding in findings if finding.level == "fault"]
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        msg = (
            f"the drafter in {folder} does not belong to this target:\n{listed}\nAll of these must "
            "agree. Use a drafter that was trained for this model."
        )
        raise ConfigError(msg)
    for finding in findings:
        level = logging.WARNING if finding.level == "warning" else logging.DEBUG
        log.log(level, "%s: %s", folder, finding.text)


def _unequal(*pairs: tuple[str, int, int]) -> list[Finding]:
    return [
        Finding(level="fault", text=f"{what}: {mine} here, {its} in the target")
        for what, mine, its in pairs
        if mine != its
    ]


def _taps(taps: Sequence[int], target: TargetInfo) -> list[Finding]:
    count = target.config.num_layers
    lost = [i for i in taps if not 0 <= i < count]
    text = f"tapped layers {lost}; the target has 0 to {count - 1}"
    return [Finding(level="fault", text=text)] if lost else []


def _length(made_for: int, target: TargetInfo) -> list[Finding]:
    served = target.config.max_position
    if made_for >= served:
        return []
    text = (
        f"it was made for {made_for} positions and the target has {served}; all are served, but past "
        "what it was trained on it may accept less"
    )
    return [Finding(level="note", text=text)]
