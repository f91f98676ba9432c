"""Drafters: who proposes what the target then verifies.

A registry line is all a new drafter needs; the conformance tests iterate over it. Host drafters work
on token ids; networks run on the device beside the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.core.registry import Registry

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.draft.base import Drafter, HostDrafter, TargetInfo
    from paceline.draft.merged import Merged

DRAFTERS: Registry[Callable[[DraftConfig], HostDrafter]] = Registry(
    "drafter",
    {
        "none": "paceline.draft.none:NoneDrafter",
        "ngram": "paceline.draft.ngram:NgramDrafter",
        "suffix": "paceline.draft.suffix:SuffixDrafter",
    },
)
NETWORKS: Registry[Callable[[DraftConfig, TargetInfo], Drafter]] = Registry(
    "drafter",
    {
        "dflash": "paceline.draft.dflash:DFlashDrafter",
        "ddtree": "paceline.draft.ddtree:DDTreeDrafter",
        "eagle3": "paceline.draft.eagle3:Eagle3Drafter",
    },
)
BORROWS_HEAD = frozenset({"dflash", "ddtree"})  # networks whose drafts go through the target's head
# Drafters made of others, which the engine builds and asks as it does any.
COMPOSITES: Registry[Callable[[DraftConfig], Merged]] = Registry(
    "drafter", {"merged": "paceline.draft.merged:Merged"}
)


AUTO = "auto"  # the drafter that was trained on the target, else one that needs no training


def names() -> tuple[str, ...]:
    """Everything that a config's `method` may be."""
    return (AUTO, *DRAFTERS, *NETWORKS, *COMPOSITES)


def check_name(name: str) -> None:
    """Refuse an unknown drafter before anything is loaded.

    Raises:
        ConfigError: the message lists the names there are.
    """
    if name not in names():
        known = dict.fromkeys(names(), "")
        Registry[object]("drafter", known).get(name)


def named(config: DraftConfig) -> tuple[str, ...]:
    """The drafters that a config asks for: its parts, or the one."""
    return config.parts if config.method in COMPOSITES else (config.method,)


def borrows_head(config: DraftConfig) -> bool:
    """Whether the drafter, or a part of it, uses the target's head at every step."""
    return not BORROWS_HEAD.isdisjoint(named(config))


def folder_problems(config: DraftConfig) -> list[str]:
    """What is wrong with a folder that a config names: a drafter without a network ignores it."""
    if config.model is None or any(n in NETWORKS or n not in names() for n in named(config)):
        return []
    asked, flag = f"the drafter {config.method!r}", "--spec"
    if config.method in COMPOSITES:
        asked, flag = f"{asked} of {', '.join(config.parts)}", "--spec-parts"
    text = (
        f"{asked} uses no folder, and {config.model!r} was given (spec_model, --spec-model); the "
        f"networks {', '.join(NETWORKS)} use one; name the network that it holds with {flag}, or "
        "leave the folder out"
    )
    return [text]


def build(config: DraftConfig) -> HostDrafter:
    """Build the host drafter that `config.method` names.

    Raises:
        ConfigError: no host drafter has that name (the message lists them), or a setting of the
            named drafter is out of range.
    """
    return DRAFTERS.get(config.method)(config)


def build_network(config: DraftConfig, target: TargetInfo) -> Drafter:
    """Build the drafter network that `config.method` names, beside its target.

    Raises:
        ConfigError: no network has that name, or it does not belong to this target.
        ModelError: its files are missing, damaged or unsupported.
    """
    return NETWORKS.get(config.method)(config, target)


def network_of(config: DraftConfig) -> DraftConfig | None:
    """The network that a config names, alone or as a part of what it is made of; None: it names none.

    Raises:
        ConfigError: its parts do not go together.
    """
    made_of = build_composite(config).parts if config.method in COMPOSITES else (config,)
    return next((part for part in made_of if part.method in NETWORKS), None)


def build_composite(config: DraftConfig) -> Merged:
    """Build what `config.method` makes of other drafters; those are built from its `parts`.

    Raises:
        ConfigError: no such drafter has that name, or the parts do not go together.
    """
    return COMPOSITES.get(config.method)(config)
