"""The stages of a run, the same for every drafter: prepare, generate, train, finish.

Each goes on where the last call stopped. What a kind of drafter adds is its `Method`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.train.accept import HeldOut, engine_accept, held_out_docs
from paceline.train.curve import Curve, read
from paceline.train.export import Story, write_story
from paceline.train.generate import OWN_GROUP, Generator
from paceline.train.jobs import JobList
from paceline.train.packing import Geometry, Packer, usual_anchors
from paceline.train.prepare import facts, prepare, together
from paceline.train.settings import TrainSettings
from paceline.train.shards import Shards, ShardWriter, check_about
from paceline.train.state import Journey, load_journey
from paceline.train.trainer import CURVE, STATE, Parts, Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.train.methods import Method
    from paceline.train.run import Run

log = logging.getLogger(__name__)

S = TypeVar("S", bound=TrainSettings)


def go(run: Run[S], method: Method[S]) -> bool:
    """Go through the stages asked for.

    Args:
        run: from `open_run`.
        method: what is trained.

    Returns:
        Whether all of them are complete; False: time was up, so call again.
    """
    stages = run.settings.stages
    method.check(run)
    if run.settings.answers:
        check_borrowed(run)
    else:
        if "prepare" in stages:
            prepare(
                run.settings.prompts,
                run.folder / "prompts",
                run.tokenizer,
                vocab_size=run.model_config.vocab_size,
                broken=run.settings.broken,
                max_tokens=run.settings.max_prompt_tokens,
                held_out=run.settings.held_out,
            )
        if "generate" in stages and not generate(run):
            return False
    if "train" in stages and not train(run, method):
        return False
    if "finish" in stages:
        if run.time_is_up():
            return False
        finish(run, method)
    return True


def check_borrowed(run: Run[Any]) -> None:
    """Refuse other runs' answers unless they are this target's, and there.

    Raises:
        ConfigError: as above.
    """
    for source in run.sources:
        if facts(source / "prompts") is None or not len(Shards(source / "answers")):
            msg = (
                f"{source} holds no answers; go through its stages 'prepare' and 'generate' first, "
                "or leave it out of --answers"
            )
            raise ConfigError(msg)
        check_about(source / "answers", run.answers_about)


def generate(run: Run[Any]) -> bool:
    """Make answers until there are enough, or until their share of time is used.

    Returns:
        Whether the run may go on; False: this call's time is up.
    """
    if (run.folder / STATE).exists():
        return True  # a drafter is being trained on them: they must not change
    if facts(run.folder / "prompts") is None:
        msg = f"{run.folder} has no prepared prompts; run the stage 'prepare' first"
        raise ConfigError(msg)
    prompts = Shards(run.folder / "prompts")
    writer = ShardWriter(
        run.folder / "answers", run.model_config.vocab_size, {"model": run.model_digest}
    )
    before = Shards(run.folder / "answers")
    goal = run.settings.answer_tokens - before.num_answer_tokens
    if goal <= 0:
        return True
    share = run.settings.generate_minutes
    own = None if share is None else time.perf_counter() + 60 * share
    limits = [limit for limit in (run.deadline, own) if limit is not None]
    settings = run.settings
    jobs = JobList(len(prompts), settings.temperatures, settings.own_share, settings.seed)
    engine = run.engine(DraftConfig(method="none", num_speculative_tokens=0), settings.max_rows)
    generator = Generator(
        engine, run.tokenizer, prompts, writer, settings, frozenset(before.docs["job"].tolist())
    )
    generator.run(jobs, goal, min(limits, default=None), run.progress)
    engine.close()
    del engine, generator
    run.free_memory()
    return not run.time_is_up()


def train(run: Run[S], method: Method[S]) -> bool:
    """Train, or go on training; returns whether all steps are taken."""
    trainer = make_trainer(run, method)
    done = trainer.run(run.deadline)
    del trainer
    run.free_memory()
    return done


def make_trainer(run: Run[S], method: Method[S]) -> Trainer:
    """Everything that training needs, with the weights of the last saved state."""
    settings = run.settings
    shards = run.answers
    learner = method.learner(run)
    geometry = Geometry(
        rows=settings.batch_rows,
        row_tokens=settings.row_tokens,
        anchors=settings.anchors or usual_anchors(shards, settings.row_tokens),
        targets=learner.num_targets,
    )
    packer = Packer(shards, geometry, settings.seed)
    log.info(
        "%d answers to train on, %d answer tokens; drafter of %.1f M parameters",
        packer.num_docs,
        shards.num_answer_tokens,
        sum(p.numel() for p in learner.task.net.parameters()) / 1e6,
    )
    return Trainer(
        Parts(
            task=learner.task,
            packer=packer,
            held_out=HeldOut(shards, geometry, settings.eval_docs, run.device),
            device=run.device,
            folder=run.folder,
            save_drafter=learner.save,
            data={
                "model": run.model_digest,
                "answers": len(shards),
                "tokens": int(shards.docs["length"].sum()),
                **learner.data,
            },
            progress=run.progress,
        ),
        settings,
    )


def finish(run: Run[S], method: Method[S]) -> None:
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
    shards = run.answers
    export(run, method, shards, journey, candidates[0], {})
    lengths = shards.docs["prompt"]
    prompts = [
        shards.tokens(index)[: int(lengths[index])].tolist()
        for index in held_out_docs(shards)[: run.settings.engine_prompts].tolist()
    ]
    if not prompts:
        return
    scores = {name: measured(run, method, run.folder / name, prompts) for name in candidates}
    curve = Curve(run.folder / CURVE, journey.step)
    for name, length in scores.items():
        curve.add("engine", journey.step, candidate=name, accept_length=round(length, 4))
    export(run, method, shards, journey, max(scores, key=lambda name: scores[name]), scores)


def export(
    run: Run[S],
    method: Method[S],
    shards: Shards,
    journey: Journey,
    chosen: str,
    scores: dict[str, float],
) -> None:
    """Write the folder to ship: drafter, card and record."""
    folder = run.folder / "export"
    words = method.export(run, run.folder / chosen, folder)
    found = [facts(source / "prompts") for source in run.sources]
    prompt_facts = [one for one in found if one is not None]
    assert len(prompt_facts) == len(found), "answers came from prepared prompts"
    device = "a CPU"
    if run.device.type == "cuda":
        device = torch.cuda.get_device_name(run.device)
    write_story(
        folder,
        Story(
            words=words,
            settings=run.settings,
            journey=journey,
            prompts=together(prompt_facts),
            num_answers=len(shards),
            num_answer_tokens=shards.num_answer_tokens,
            num_own=int((shards.docs["group"] == OWN_GROUP.encode()).sum()),
            curve=read(run.folder / CURVE),
            engine=scores,
            chosen=chosen,
            command=run.command,
            device=device,
        ),
    )
    log.info("exported %s to %s", chosen, folder)


def measured(run: Run[S], method: Method[S], drafter: Path, prompts: list[list[int]]) -> float:
    """Accept length of a drafter's folder in the engine, greedy."""
    engine = run.engine(method.served(run, drafter), rows=min(len(prompts), run.settings.max_rows))
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
    run.free_memory()
    log.info("%s: accept length %.3f in the engine, %d prompts", drafter.name, length, len(prompts))
    return length
