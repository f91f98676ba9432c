"""A drafter that training goes on with: does its vocabulary map belong to its head, and to these answers?

A map that is one token off shifts every later row: drafts are well-formed and nearly all wrong, and a
loss over the same rows does not notice (see "wrong maps" in docs/training.md). What gives it away is the
head itself: its rows vote on what they stand for (`draft/eagle3_votes.py`).

`mend` gives a drafter the vocabulary of a run's answers. Rows of tokens that it knew move along.

Letters: n places, V vocabulary, Vd draft vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.draft.eagle3_net import Eagle3Net
from paceline.draft.eagle3_votes import Findings, Ints, compare
from paceline.train.eagle3 import plain

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.train.eagle3 import Eagle3Task
    from paceline.train.packing import Packer

log = logging.getLogger(__name__)

_LOOK = 60_000  # places looked at
_HEALTHY_COVERAGE = 0.9
_HEALTHY_RIGHT = 0.15


def examine(task: Eagle3Task, packer: Packer, device: torch.device) -> Findings:
    """Compare the drafter's map with what its head says, on training batches of one epoch."""
    rows, tokens = [], []
    for step in range(packer.steps_per_epoch):  # a place seen twice would testify for itself
        batch = packer.batch(step).to(device)
        said, wanted = task.first_drafts(batch)
        rows.append(said[batch.alive].cpu().numpy())
        tokens.append(wanted[batch.alive].cpu().numpy())
        if sum(map(len, rows)) >= _LOOK:
            break
    net = task.net
    return compare(
        np.concatenate(rows), np.concatenate(tokens), net.d2t.cpu().numpy(), net.config.vocab_size
    )


def judge(found: Findings, folder: Path) -> None:
    """Refuse a wrong map; say what else is to be known before training goes on.

    Raises:
        ConfigError: the map is wrong.
    """
    if found.wrong:
        msg = (
            f"the vocabulary map of the drafter in {folder} is wrong: {found.describe()}. Training "
            "would teach its head other tokens from the beginning. Add --remap to rebuild the map "
            "from the answers and keep what the head knows, or use the folder that map and head "
            "came from."
        )
        raise ConfigError(msg)
    if found.coverage < _HEALTHY_COVERAGE:
        log.warning(
            "%s: the vocabulary map fits these answers poorly: %s. --remap drafts the tokens that "
            "they are made of.",
            folder,
            found.describe(),
        )
    elif found.right < _HEALTHY_RIGHT:
        log.warning(
            "%s: the drafter hardly knows this target, and its vocabulary map is not why: %s. It "
            "may have been trained for another target, or with other tapped layers.",
            folder,
            found.describe(),
        )
    else:
        log.info("%s: the vocabulary map is sound: %s", folder, found.describe())


@torch.no_grad()
def mend(net: Eagle3Net, stands_for: Ints, ids: Ints) -> Eagle3Net:
    """The same drafter with the vocabulary `ids`.

    Rows of the head move with their tokens. A token that had none starts from the mean of all rows,
    which is nobody's favourite.

    Args:
        net: the drafter; not changed.
        stands_for: [Vd] token of each row of its head; -1: not known.
        ids: [new Vd] tokens, sorted.
    """
    config = replace(net.config, draft_vocab_size=len(ids))
    made = Eagle3Net(config, net.target, dtype=net.dtype, device=net.d2t.device)
    old, new = plain(net.lm_head), plain(made.lm_head)
    kept = {n: p for n, p in net.named_parameters() if not n.startswith("lm_head.")}
    for name, parameter in made.named_parameters():
        if name in kept:
            parameter.copy_(kept[name])
    new.copy_(old.mean(0, dtype=torch.float32).to(old.dtype).expand_as(new))
    known = np.flatnonzero(stands_for >= 0)
    at = np.searchsorted(ids, stands_for[known])
    at = np.minimum(at, len(ids) - 1)
    there = ids[at] == stands_for[known]
    new[torch.from_numpy(at[there])] = old[torch.from_numpy(known[there])]
    made.set_vocabulary(torch.from_numpy(ids))
    log.info(
        "vocabulary of %d tokens rebuilt from the answers; %d rows of the head were kept",
        len(ids),
        int(there.sum()),
    )
    return made
