"""The two stages of a run that are DFlash's own: training, and measuring and exporting its result."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.draft import dflash_checkpoint
from paceline.draft.dflash_config import read_config
from paceline.draft.dflash_net import DFlashNet
from paceline.train.accept import HeldOut, engine_accept, held_out_docs
from paceline.train.curve import Curve, read
from paceline.train.dflash import DFlashTask, choose_mask_token, initialise, new_config, target_info
from paceline.train.export import SHARD_BYTES, Story, write_story
from paceline.train.generate import OWN_GROUP
from paceline.train.losses import RowWeights
from paceline.train.packing import Geometry, Packer
from paceline.train.prepare import facts
from paceline.train.run import Run, free_memory
from paceline.train.shards import Shards
from paceline.train.state import Journey, load_journey
from paceline.train.trainer import CURVE, STATE, Parts, Trainer

if TYPE_CHECKING:
    from paceline.train.settings import TrainSettings

log = logging.getLogger(__name__)


def train(run: Run) -> bool:
    """Train, or go on training; returns whether all steps are taken."""
    trainer = make_trainer(run)
    done = trainer.run(run.deadline)
    del trainer
    free_memory(run.device)
    return done


def make_trainer(run: Run) -> Trainer:
    """Everything that training needs, with the weights of the last saved state."""
    settings = run.settings
    shards = Shards(run.folder / "answers")
    net = _net(run)
    geometry = Geometry(
        rows=settings.batch_rows,
        row_tokens=settings.row_tokens,
        anchors=settings.anchors,
        targets=net.config.num_proposals,
    )
    compiled = run.device.type == "cuda" if settings.compile is None else settings.compile
    task = DFlashTask(run.loaded.net, net, _weigh(settings), compiled=compiled)

    def save(folder: Path) -> None:
        dflash_checkpoint.save(net, folder, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)

    packer = Packer(shards, geometry, settings.seed)
    log.info(
        "%d answers to train on, %d answer tokens; drafter of %.1f M parameters",
        packer.num_docs,
        shards.num_answer_tokens,
        sum(p.numel() for p in net.parameters()) / 1e6,
    )
    return Trainer(
        Parts(
            task=task,
            packer=packer,
            held_out=HeldOut(shards, geometry, settings.eval_docs, run.device),
            device=run.device,
            folder=run.folder,
            save_drafter=save,
            data={
                "model": run.model_digest,
                "answers": len(shards),
                "tokens": int(shards.docs["length"].sum()),
            },
            progress=run.progress,
        ),
        settings,
    )


def _net(run: Run) -> DFlashNet:
    target = run.loaded.net
    info = target_info(target)
    settings = run.settings
    if settings.init is not None:
        return dflash_checkpoint.load_plain(settings.init, info, dtype=info.dtype)
    mask = settings.mask_token
    if mask is None:
        mask = choose_mask_token(run.tokenizer, target)
    elif not 0 <= mask < target.config.vocab_size:
        msg = f"mask token {mask} is no token; ids 0 ... {target.config.vocab_size - 1} are"
        raise ConfigError(msg)
    net = DFlashNet(new_config(settings, target.config, mask), info)
    initialise(net, settings.seed)
    return net


def _weigh(settings: TrainSettings) -> RowWeights:
    return RowWeights(gamma=settings.gamma, dpace=settings.loss == "dpace", alpha=settings.alpha)


def finish(run: Run) -> None:
    """Export the drafter, after the engine has chosen between the best and the last one.

    The best by held-out answers is exported first, so that there is one whatever happens then.

    Raises:
        ConfigError: nothing was trained yet.
        OSError: the disk is full; an earlier export is still whole.
    """
    candidates = [name for name in ("best", "last") if (run.folder / name).is_dir()]
    if not candidates:
        msg = f"{run.folder} holds no trained drafter yet; run the stage 'train' first"
        raise ConfigError(msg)
    journey = load_journey(run.folder / STATE)
    if journey.best_step == journey.step:
        candidates = candidates[:1]  # the last is the best
    shards = Shards(run.folder / "answers")
    _export(run, shards, journey, candidates[0], {})
    lengths = shards.docs["prompt"]
    prompts = [
        shards.tokens(index)[: int(lengths[index])].tolist()
        for index in held_out_docs(shards)[: run.settings.engine_prompts].tolist()
    ]
    if not prompts:
        return
    scores = {name: measured(run, run.folder / name, prompts) for name in candidates}
    curve = Curve(run.folder / CURVE, journey.step)
    for name, length in scores.items():
        curve.add("engine", journey.step, candidate=name, accept_length=round(length, 4))
    _export(run, shards, journey, max(scores, key=lambda name: scores[name]), scores)


def _export(
    run: Run, shards: Shards, journey: Journey, chosen: str, scores: dict[str, float]
) -> None:
    info = target_info(run.loaded.net)
    net = dflash_checkpoint.load_plain(run.folder / chosen, info, dtype=torch.bfloat16)
    folder = run.folder / "export"
    dflash_checkpoint.save(net, folder, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)
    prompt_facts = facts(run.folder / "prompts")
    assert prompt_facts is not None, "answers came from prepared prompts"
    device = "a CPU"
    if run.device.type == "cuda":
        device = torch.cuda.get_device_name(run.device)
    write_story(
        folder,
        Story(
            config=net.config,
            settings=run.settings,
            journey=journey,
            prompts=prompt_facts,
            num_parameters=sum(p.numel() for p in net.parameters()),
            num_answers=len(shards),
            num_answer_tokens=shards.num_answer_tokens,
            num_own=int((shards.docs["group"] == OWN_GROUP.encode()).sum()),
            curve=read(run.folder / CURVE),
            engine=scores,
            chosen=chosen,
            command=run.command,
            device=device,
            model=run.settings.model,
        ),
    )
    log.info("exported %s to %s", chosen, folder)


def measured(run: Run, drafter: Path, prompts: list[list[int]]) -> float:
    """Accept length of a drafter's folder in the engine, greedy."""
    net = read_config(drafter)
    engine = run.engine(
        DraftConfig(
            method="dflash",
            model=str(drafter),
            num_speculative_tokens=net.num_proposals,
            adaptive=False,
        ),
        rows=min(len(prompts), run.settings.max_rows),
    )
    try:
        length = engine_accept(
            engine,
            prompts,
            max_new_tokens=run.settings.max_new_tokens,
            stop_ids=run.stop_ids,
        )
    finally:
        engine.close()
    del engine
    free_memory(run.device)
    log.info("%s: accept length %.3f in the engine, %d prompts", drafter.name, length, len(prompts))
    return length
