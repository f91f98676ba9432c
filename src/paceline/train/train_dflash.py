"""What training a DFlash drafter adds to a run's stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.draft import dflash_checkpoint
from paceline.draft.dflash_config import read_config
from paceline.draft.dflash_net import DFlashNet
from paceline.train.dflash import DFlashTask, choose_mask_token, initialise, new_config
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.export import SHARD_BYTES, bare, weighing
from paceline.train.losses import row_weights
from paceline.train.methods import Learner, Words
from paceline.train.target import target_info

if TYPE_CHECKING:
    from paceline.train.run import Run


class DFlashMethod:
    """See `paceline.train.methods.Method`."""

    settings: type[DFlashSettings] = DFlashSettings

    def check(self, run: Run[DFlashSettings]) -> None:
        """See `Method`."""
        settings, vocab_size = run.settings, run.model_config.vocab_size
        if settings.init is not None:
            if "train" in settings.stages:
                read_config(settings.init)
            return
        mask = settings.mask_token
        if mask is not None and not 0 <= mask < vocab_size:
            msg = (
                f"mask token {mask} is no token; ids 0 ... {vocab_size - 1} are. Give one of these "
                "that text has not, or leave --mask-token out"
            )
            raise ConfigError(msg)
        new_config(settings, run.model_config, mask or 0)

    def learner(self, run: Run[DFlashSettings]) -> Learner:
        """See `Method`."""
        net = _net(run)
        weigh = row_weights(run.settings)
        return Learner(
            task=DFlashTask(run.loaded.net, net, weigh, compiled=run.compiled),
            num_targets=net.config.num_proposals,
            save=lambda folder: _save(net, folder),
            data={},
        )

    def served(self, run: Run[DFlashSettings], folder: Path) -> DraftConfig:
        """See `Method`."""
        del run
        return DraftConfig(
            method="dflash",
            model=str(folder),
            num_speculative_tokens=read_config(folder).num_proposals,
            adaptive=False,
        )

    def export(self, run: Run[DFlashSettings], source: Path, folder: Path) -> Words:
        """See `Method`."""
        info = target_info(run.loaded.net)
        net = dflash_checkpoint.load_plain(source, info, dtype=torch.bfloat16)
        _save(net, folder)
        config, settings = net.config, run.settings
        count = sum(p.numel() for p in net.parameters())
        return Words(
            title=f"DFlash drafter for {bare(settings.model)}",
            about=f"""Drafts {config.block_size - 1} tokens in one pass (DFlash, arXiv 2602.06036); z-lab's
layout, bfloat16, {count / 1e6:.1f} M parameters: {config.num_layers} layers of width {config.hidden_size} (MLP
{config.intermediate_size}), block {config.block_size}, taps {", ".join(map(str, config.target_layer_ids))} of
{config.num_target_layers} layers, mask token {config.mask_token_id}. Embedding and head are the target's.""",
            recipe=f"""blocks in all, from up to {settings.anchors} random anchors a row; target,
embedding and head frozen; cross-entropy weighed by {weighing(settings)}""",
            num_parameters=count,
            facts={},
        )


METHOD: Final = DFlashMethod()


def _save(net: DFlashNet, folder: Path) -> None:
    dflash_checkpoint.save(net, folder, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)


def _net(run: Run[DFlashSettings]) -> DFlashNet:
    target = run.loaded.net
    info = target_info(target)
    settings = run.settings
    if settings.init is not None:
        return dflash_checkpoint.load_plain(settings.init, info, dtype=info.dtype)
    mask = settings.mask_token
    if mask is None:
        mask = choose_mask_token(run.tokenizer, target)
    net = DFlashNet(new_config(settings, target.config, mask), info)
    initialise(net, settings.seed)
    return net
