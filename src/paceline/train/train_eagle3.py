"""What training an EAGLE-3 drafter adds to a run's stages."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from paceline.core.config import DraftConfig
from paceline.core.errors import ModelError
from paceline.draft import eagle3_checkpoint
from paceline.draft.eagle3_layouts import read_config
from paceline.draft.eagle3_net import Eagle3Net
from paceline.train import mending, vocabulary
from paceline.train.eagle3 import Eagle3Task, initialise, new_config
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.export import SHARD_BYTES, bare, weighing
from paceline.train.losses import row_weights
from paceline.train.methods import Learner, Words
from paceline.train.packing import Geometry, Packer
from paceline.train.target import target_info

if TYPE_CHECKING:
    from paceline.train.run import Run
    from paceline.train.shards import Shards

log = logging.getLogger(__name__)


class Eagle3Method:
    """See `paceline.train.methods.Method`."""

    settings: type[Eagle3Settings] = Eagle3Settings

    def check(self, run: Run[Eagle3Settings]) -> None:
        """See `Method`."""
        settings, facts = run.settings, run.model_config
        if settings.init is None:
            new_config(settings, facts)
        elif "train" in settings.stages:
            read_config(settings.init, facts.num_layers)

    def learner(self, run: Run[Eagle3Settings]) -> Learner:
        """See `Method`."""
        shards = run.answers
        net = (
            _new(run, shards)
            if run.settings.init is None
            else _given(run, shards, run.settings.init)
        )
        ids = net.d2t.cpu().numpy()
        held_out = vocabulary.held_out_counts(shards, net.config.vocab_size)
        log.info(
            "draft vocabulary of %d tokens: covers %.2f %% of the held-out answers",
            len(ids),
            100 * vocabulary.coverage(held_out, ids),
        )
        return Learner(
            task=_task(run, net, compiled=run.compiled),
            num_targets=run.settings.ttt_steps,
            save=lambda folder: _save(net, folder),
            data={"vocabulary": vocabulary.fingerprint(ids)},
        )

    def served(self, run: Run[Eagle3Settings], folder: Path) -> DraftConfig:
        """See `Method`."""
        return DraftConfig(
            method="eagle3",
            model=str(folder),
            num_speculative_tokens=run.settings.ttt_steps,
            eagle_num_steps=run.settings.ttt_steps,
            eagle_topk=1,
            adaptive=False,
        )

    def export(self, run: Run[Eagle3Settings], source: Path, folder: Path) -> Words:
        """See `Method`."""
        info = target_info(run.loaded.net)
        net = eagle3_checkpoint.load_plain(source, info, dtype=torch.bfloat16)
        _save(net, folder)
        config, settings, ids = net.config, run.settings, net.d2t.cpu().numpy()
        count = sum(p.numel() for p in net.parameters())
        shards = run.answers
        trained, held_out = (
            vocabulary.coverage(counted(shards, config.vocab_size), ids)
            for counted in (vocabulary.trained_counts, vocabulary.held_out_counts)
        )
        chains = f"up to {settings.anchors} random" if settings.anchors else "nearly all"
        return Words(
            title=f"EAGLE-3 drafter for {bare(settings.model)}",
            about=f"""Drafts one token after the other, each from what it made of the one before (EAGLE-3, arXiv
2503.01840); SpecForge's layout, bfloat16, {count / 1e6:.1f} M parameters: one layer of width {config.hidden_size}
(MLP {config.intermediate_size}), taps the outputs of layers {", ".join(map(str, config.aux_layers))} of
{run.model_config.num_layers}. The embedding is the target's. The head has {config.draft_vocab_size} of the
target's {config.vocab_size} tokens, the most frequent of the answers: {trained:.2%} of the answers
trained on and {held_out:.2%} of the held-out ones (vocabulary {vocabulary.fingerprint(ids)}).""",
            recipe=f"""chains of {settings.ttt_steps} steps in all, from {chains} answer tokens of a row,
unrolled as in serving (training-time test); target and embedding frozen; cross-entropy with the target's
distribution over the draft vocabulary, weighed by {weighing(settings)}""",
            num_parameters=count,
            facts={
                "vocabulary": vocabulary.fingerprint(ids),
                "coverage_trained": round(trained, 5),
                "coverage_held_out": round(held_out, 5),
            },
        )


METHOD: Final = Eagle3Method()


def _save(net: Eagle3Net, folder: Path) -> None:
    eagle3_checkpoint.save(net, folder, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)


def _task(run: Run[Eagle3Settings], net: Eagle3Net, *, compiled: bool) -> Eagle3Task:
    weigh = row_weights(run.settings)
    return Eagle3Task(run.loaded.net, net, run.settings.ttt_steps, weigh, compiled=compiled)


def _new(run: Run[Eagle3Settings], shards: Shards) -> Eagle3Net:
    target, settings = run.loaded.net, run.settings
    config = new_config(settings, target.config)
    counts = vocabulary.trained_counts(shards, config.vocab_size)
    net = Eagle3Net(config, target_info(target))
    net.set_vocabulary(torch.from_numpy(vocabulary.most_frequent(counts, config.draft_vocab_size)))
    initialise(net, target, settings.seed)
    return net


def _given(run: Run[Eagle3Settings], shards: Shards, folder: Path) -> Eagle3Net:
    """The drafter of `--init`, its map checked against what the target says, and mended if asked."""
    info, settings = target_info(run.loaded.net), run.settings
    mapped = True
    try:
        net = eagle3_checkpoint.load_plain(folder, info, dtype=info.dtype)
    except ModelError as error:
        if not settings.remap:
            raise
        net = eagle3_checkpoint.load_unmapped(folder, info, dtype=info.dtype)
        mapped = False
        log.warning("%s --remap goes on without its vocabulary map.", error)
    geometry = Geometry(
        rows=settings.batch_rows,
        row_tokens=settings.row_tokens,
        anchors=settings.row_tokens,
        targets=1,
    )
    task = Eagle3Task(run.loaded.net, net, 1, row_weights(settings))
    found = mending.examine(task, Packer(shards, geometry, settings.seed), run.device)
    if not settings.remap:
        mending.judge(found, folder)
        return net
    log.info("%s: the vocabulary map as it is: %s", folder, found.describe())
    stands_for = net.d2t.cpu().numpy() if mapped and not found.wrong else found.as_read
    counts = vocabulary.trained_counts(shards, net.config.vocab_size)
    size = min(settings.draft_vocab, net.config.vocab_size)
    return mending.mend(net, stands_for, vocabulary.most_frequent(counts, size))
