"""Which drafter a config means: what "auto" is, and the folder of a network that names none."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.draft import AUTO, NETWORKS, named, shipped
from paceline.models.cache import digest

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.models.source import ModelFiles

log = logging.getLogger(__name__)

_UNTRAINED = "suffix"  # needs no training and knows no target


def choose_drafter(config: DraftConfig, files: ModelFiles) -> tuple[DraftConfig, tuple[str, ...]]:
    """Resolve "auto", and find the folder of a network where the config names none.

    "auto" is the best drafter that comes with Paceline for exactly this target, else the suffix tree.

    Args:
        config: how tokens are to be proposed.
        files: of the target.

    Returns:
        The config, and what to tell people.

    Raises:
        ModelError: the list of drafters that come with Paceline is damaged.
    """
    networks = [name for name in named(config) if name in NETWORKS]
    asks = config.method == AUTO or (networks and config.model is None)
    if not asks:
        return config, ()
    for drafter in shipped.find(digest(files.path)) if files.kind == "gguf" else ():
        method = drafter.methods[0] if config.method == AUTO else config.method
        if set(networks) <= set(drafter.methods):
            note = f"drafter: {method}, with the weights trained on {drafter.target}"
            log.info("%s", note)
            return replace(config, method=method, model=str(drafter.folder)), (note,)
    if config.method == AUTO:
        return replace(config, method=_UNTRAINED), ()
    return config, ()  # the network refuses, and says what it needs
