"""A wrong vocabulary map is named with figures, mended, and trained on from there."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, ModelError
from paceline.core.request import SamplingParams
from paceline.draft import eagle3_checkpoint
from paceline.draft.eagle3_net import Eagle3Net
from paceline.draft.eagle3_votes import compare, read_off
from paceline.models import LoadedModel
from paceline.train.curve import read
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.mending import judge, mend
from paceline.train.progress import LogLines
from paceline.train.run import Run, open_run
from paceline.train.shards import Doc
from paceline.train.stages import make_trainer
from paceline.train.target import target_info
from paceline.train.train_eagle3 import METHOD
from tests.engine.harness import engine, request, run
from tests.unit.train.making import DRAFTED, new_eagle3, write_docs

SIZE = 64  # of the draft vocabulary


class Words:
    """No tokenizer: answers are there already."""

    special_ids: frozenset[int] = frozenset()
    eos_token_ids = (2,)


@pytest.fixture(scope="module")
def docs(target_folder: Path) -> list[Doc]:
    """What the tiny target says to two dozen prompts."""
    prompts = [[(11 * i * j) % 60 + 3 for i in range(4 + j % 3)] for j in range(1, 25)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    plain = engine(target_folder, method="none", num_speculative_tokens=0)
    done = run(plain, [request(str(i), p, params) for i, p in enumerate(prompts)])
    return [
        Doc(token_ids=[*p, *done[str(i)].tokens], num_prompt=len(p), held_out=i % 8 == 0)
        for i, p in enumerate(prompts)
    ]


Opened = Callable[..., Run[Eagle3Settings]]


@pytest.fixture
def opened(tmp_path: Path, target_folder: Path, docs: list[Doc]) -> Opened:
    """A run in a folder of its own; further arguments are settings."""

    def make(name: str, **given: object) -> Run[Eagle3Settings]:
        base = {"model": str(target_folder), "device": "cpu", "dtype": "float32", "own_share": 1.0}
        base |= {"draft_vocab": SIZE, "ttt_steps": 3, "mlp_size": 80, "taps": (0, 1, 2)}
        base |= {"row_tokens": 96, "batch_rows": 2, "lr": 4e-3, "warmup": 5, "evals": 1}
        base |= {"log_steps": 1, "steps": 60}
        folder = tmp_path / name
        write_docs(folder / "answers", docs)
        return open_run(
            Eagle3Settings, folder, base | given, lambda _: Words(), LogLines(), "train"
        )

    return make


def losses(folder: Path) -> list[float]:
    return [float(str(x["loss"])) for x in read(folder / "curve.jsonl") if x["kind"] == "train"]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a drafter's folder with other tensors."""
    other = folder.with_name(f"{folder.name}-wrong")
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return other


def shifted(tensors: dict[str, Any]) -> None:
    """The map of another count: sorted and in range, but hardly any row is the same token's."""
    ids = (tensors["d2t"] + torch.arange(SIZE)).tolist()
    lowest = min(set(range(97)) - {*ids})
    others = torch.tensor(sorted({*ids[:-1], lowest}))
    tensors["d2t"] = others - torch.arange(SIZE)
    tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill(0, others, value=True)


def zeroed(tensors: dict[str, Any]) -> None:
    """A map that was never set, which no loader takes."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def test_a_wrong_map_is_named_mended_and_trained_on(
    tmp_path: Path, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    """Figures in the refusal; once mended, training starts below chance and stays ahead of a new one."""
    first = opened("scratch")
    assert make_trainer(first, METHOD).run(None)
    drafter = first.folder / "best"
    scratch = losses(first.folder)

    wrong = rewritten(drafter, shifted)
    with pytest.raises(
        ConfigError, match=r"(?s)map of the drafter .* is wrong: .*--remap"
    ) as found:
        make_trainer(opened("refused", init=wrong), METHOD)
    message = str(found.value)
    assert "of first drafts are right" in message
    figures = re.search(r"(\d+) of (\d+) rows of the head that could be heard agree", message)
    assert figures is not None, message
    agreeing, heard = map(int, figures.groups())
    assert heard >= 10
    assert agreeing <= heard / 10

    for name, broken in (("shifted", wrong), ("zeroed", rewritten(wrong, zeroed))):
        if name == "zeroed":
            with pytest.raises(ModelError, match="d2t is all zero"):
                make_trainer(opened("unread", init=broken), METHOD)
        mended = opened(name, init=broken, remap=True, steps=10, lr=5e-4)
        assert make_trainer(mended, METHOD).run(None)
        tuned = losses(mended.folder)
        assert tuned[0] < math.log(SIZE), "below random loss"
        beside = list(zip(tuned, scratch, strict=False))
        assert sum(a < b for a, b in beside) >= len(beside) - 1, "ahead of training from scratch"

    # The same weights under their own map go on as well as they ended.
    with caplog.at_level(logging.INFO):
        right = opened("right", init=drafter, steps=4, lr=1e-4)
        assert make_trainer(right, METHOD).run(None)
    assert "the vocabulary map is sound" in caplog.text
    assert losses(right.folder)[0] == pytest.approx(scratch[-1], abs=0.5)


def test_rows_are_read_off_by_their_votes() -> None:
    """The clearest claims first; a token belongs to one row; too few votes are no voice."""
    rows = np.array([0] * 6 + [1] * 5 + [2] * 2 + [3] * 4)
    tokens = np.array([7, 7, 7, 7, 5, 5, 7, 7, 7, 8, 8, 4, 4, 9, 9, 9, 9])
    assert read_off(rows, tokens, 5, 10).tolist() == [7, -1, -1, 9, -1]


def test_findings_tell_maps_apart() -> None:
    """A sound map, one that is one off, and a drafter that knows nothing of this target."""
    rng = np.random.default_rng(0)
    ids = np.arange(3, 83, 2)  # 40 of 97 tokens
    rows = rng.integers(0, 40, 4000)
    right = compare(rows, ids[rows], ids, 97)
    assert not right.wrong
    assert (right.coverage, right.right, right.num_agreeing) == (1.0, 1.0, 40)
    other = np.sort(np.append(ids[:-1], 0))
    wrong = compare(rows, ids[rows], other, 97)
    assert wrong.wrong
    assert (wrong.num_agreeing, wrong.num_heard) == (0, 40)
    assert wrong.coverage == pytest.approx(39 / 40, abs=0.02)
    blind = compare(rows, rng.integers(0, 97, 4000), ids, 97)
    assert not blind.wrong, "no map would help"


def test_what_is_only_poor_is_said_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Another domain's vocabulary, or another target's drafter: a warning with the figures."""
    ids = np.arange(40)
    rows = np.arange(4000) % 40
    with caplog.at_level(logging.WARNING):
        judge(compare(rows, np.where(rows < 20, rows, rows + 50), ids, 97), Path("folder"))
    assert "fits these answers poorly: it covers 50.0%" in caplog.text
    caplog.clear()
    tokens = np.random.default_rng(0).integers(0, 40, 4000)
    with caplog.at_level(logging.WARNING):
        judge(compare(rows, tokens, ids, 97), Path("folder"))
    assert "hardly knows this target" in caplog.text


def test_mending_moves_rows_with_their_tokens(target: LoadedModel) -> None:
    """Known tokens keep their rows, new ones start from the mean; all other weights are the same."""
    net: Eagle3Net = new_eagle3(target)
    ids = np.array(sorted({*DRAFTED[5:], 96, 95, 94}))
    made = mend(net, net.d2t.numpy(), ids)
    assert made.d2t.tolist() == ids.tolist()
    assert int(made.t2d.sum()) == len(ids) == made.config.draft_vocab_size
    for i, token in enumerate(ids.tolist()):
        at = (net.d2t == token).nonzero().flatten().tolist()
        expected = net.lm_head.weight[at[0]] if at else net.lm_head.weight.mean(0)
        torch.testing.assert_close(made.lm_head.weight[i], expected)
    kept = dict(net.named_parameters())
    for name, parameter in made.named_parameters():
        assert name == "lm_head.weight" or torch.equal(parameter, kept[name]), name


def test_maps_need_not_be_there_to_be_mended(target: LoadedModel, tmp_path: Path) -> None:
    """Weights of a folder without its maps: equal, under the identity."""
    net = new_eagle3(target)
    eagle3_checkpoint.save(net, tmp_path / "drafter", dtype=torch.float64)
    wrong = rewritten(tmp_path / "drafter", zeroed_all)
    back = eagle3_checkpoint.load_unmapped(wrong, target_info(target.net), dtype=torch.float64)
    assert torch.equal(back.lm_head.weight, net.lm_head.weight)
    assert back.d2t.tolist() == list(range(len(DRAFTED)))


def zeroed_all(tensors: dict[str, Any]) -> None:
    """Both maps, as a converter that forgot them leaves them."""
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
