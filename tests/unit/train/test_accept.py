"""Accept length read off answers is the accept length that the engine reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams
from paceline.draft import dflash_checkpoint, eagle3_checkpoint
from paceline.models import LoadedModel
from paceline.train.accept import HeldOut, Matcher, engine_accept, held_out_docs, walk
from paceline.train.dflash import DFlashTask
from paceline.train.eagle3 import Eagle3Task
from paceline.train.packing import Geometry
from paceline.train.shards import Doc
from tests.engine.harness import STOP_ID, engine, request, run
from tests.unit.train.making import (
    BLOCK,
    CHAIN,
    DECAY,
    new_eagle3,
    new_net,
    random_docs,
    write_docs,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "matched, steps",
    [([0, 0, 0], 3), ([2, 0, 0], 1), ([1, 9, 1, 9], 2), ([], 0), ([3, 0, 0, 0, 0], 2)],
)
def test_walk(matched: list[int], steps: int) -> None:
    """Accepted drafts and the bonus are skipped; the rest starts a pass each."""
    assert walk(np.array(matched, dtype=np.int64)) == steps


def dflash(target: LoadedModel, folder: Path) -> tuple[Matcher, int, dict[str, object]]:
    """In training, how many tokens it drafts, and how the engine is told of it."""
    net = new_net(target)
    sharpened(net)
    dflash_checkpoint.save(net, folder, dtype=torch.float64)
    return DFlashTask(target.net, net, DECAY), BLOCK - 1, {"method": "dflash"}


def eagle3(target: LoadedModel, folder: Path) -> tuple[Matcher, int, dict[str, object]]:
    """The same, a chain of all of the target's tokens but a few."""
    net = new_eagle3(target, vocabulary=range(1, 90))
    sharpened(net)
    eagle3_checkpoint.save(net, folder, dtype=torch.float64)
    steps = {"method": "eagle3", "eagle_num_steps": CHAIN}
    return Eagle3Task(target.net, net, CHAIN, DECAY), CHAIN, steps


@torch.no_grad()
def sharpened(net: nn.Module) -> None:
    """Good in places: larger weights say single tokens, of which some come true."""
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)


@pytest.mark.parametrize("kind", [dflash, eagle3])
def test_read_off_equals_measured(
    tmp_path: Path,
    target: LoadedModel,
    target_folder: Path,
    kind: Callable[[LoadedModel, Path], tuple[Matcher, int, dict[str, object]]],
) -> None:
    """Same answers, same drafter: the same figure to the last digit, whatever the batch shapes."""
    prompts = [[(7 * i * j) % 60 + 3 for i in range(5 + j)] for j in range(1, 7)]
    params = SamplingParams(max_tokens=30, temperature=0.0)
    plain = engine(target_folder, method="none", num_speculative_tokens=0)
    done = run(plain, [request(str(i), p, params) for i, p in enumerate(prompts)])
    docs = [
        Doc(
            token_ids=[*p, *done[str(i)].tokens],
            num_prompt=len(p),
            held_out=True,
            group="ab"[i % 2],
        )
        for i, p in enumerate(prompts)
    ]
    folder = tmp_path / "drafter"
    task, drafts, how = kind(target, folder)
    shards = write_docs(tmp_path / "docs", [*random_docs(4, held_out_every=9)[1:], *docs])
    found = [
        HeldOut(shards, Geometry(rows=r, row_tokens=c, anchors=n, targets=drafts), 99, CPU).measure(
            task
        )
        for r, c, n in ((2, 100, 7), (1, 64, 64))
    ]
    eng = engine(target_folder, model=str(folder), num_speculative_tokens=drafts, **how)
    real = engine_accept(eng, prompts, max_new_tokens=30, stop_ids=frozenset({STOP_ID}))
    assert real > 1.0, "nothing was ever accepted"
    for accept in found:
        assert accept.length == pytest.approx(real, rel=1e-12)
        assert set(accept.by_group) == {"a", "b"}
        assert accept.num_tokens == sum(len(d.token_ids) - d.num_prompt - 1 for d in docs)


def test_a_held_out_prompt_counts_once(tmp_path: Path) -> None:
    """Later passes over the files answer it again, with the same answer."""
    doc = Doc(token_ids=[5, 6, 7, 8], num_prompt=2, held_out=True)
    other = replace(doc, token_ids=[5, 7, 7, 8])
    sampled = replace(doc, token_ids=[9, 7, 7, 8], temperature=1.0)
    shards = write_docs(tmp_path, [doc, sampled, other, doc, replace(doc, held_out=False)])
    assert held_out_docs(shards).tolist() == [0, 2]


def test_no_held_out_answer_is_said(tmp_path: Path) -> None:
    """Sampled answers cannot be measured this way, so they do not count."""
    docs = [
        Doc(token_ids=[5] * 9, num_prompt=2),
        Doc(token_ids=[5] * 9, num_prompt=2, held_out=True, temperature=1.0),
    ]
    shards = write_docs(tmp_path, docs)
    with pytest.raises(ConfigError, match="none of 2 answers is held out"):
        HeldOut(shards, Geometry(rows=1, row_tokens=32, anchors=4, targets=4), 5, CPU)
