"""A drafter that is read wrongly, or is another target's, is named as what it is; a right one passes.

Tiny drafters that half know what a four-layer target says; then one thing is changed in a copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.core.request import SamplingParams
from paceline.draft import NETWORKS
from paceline.draft.selftest import SUBJECTS, Report, Text, examine
from tests import tiny
from tests.dense import target_of
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import overfit_dflash
from tests.tiny_eagle3 import overfit_eagle3

PROMPTS = [[(11 * i * j) % 60 + 3 for i in range(3 + j % 5)] for j in range(1, 9)]
EAGLE_TAPS = "eagle_aux_hidden_state_layer_ids"


def answers(target: Path) -> list[Text]:
    """What a target says to the prompts, greedily."""
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    eng = engine(target, method="none", num_speculative_tokens=0)
    done = run(eng, [request(str(i), p, params) for i, p in enumerate(PROMPTS)])
    return [
        Text(tokens=[*p, *done[str(i)].tokens], num_prompt=len(p)) for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four layers, so that taps have neighbours."""
    return tiny.write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def texts(target: Path) -> list[Text]:
    """What it says."""
    return answers(target)


Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(target: Path, texts: list[Text], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Drafters by name, each trained once on the target's answers."""
    folders: dict[str, Path] = {}
    eagle = {"eagle_config": {EAGLE_TAPS: [1, 2, 2], "use_aux_hidden_state": True}}
    kinds: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
        "dflash": (overfit_dflash, {"dflash_config": {"target_layer_ids": [1, 2]}}),
        "dflash-anchor": (
            overfit_dflash,
            {"dflash_config": {"target_layer_ids": [1, 2], "sample_from_anchor": True}},
        ),
        "dflash-causal": (
            overfit_dflash,
            {"dflash_config": {"target_layer_ids": [1, 2]}, "is_causal": True, "block_size": 8},
        ),
        "eagle3": (overfit_eagle3, eagle),
        "eagle3-residual": (overfit_eagle3, {**eagle, "norm_before_residual": True}),
        "eagle3-output": (overfit_eagle3, {**eagle, "norm_output": True}),
    }

    def folder(name: str) -> Path:
        if name not in folders:
            build, options = kinds[name]
            spoken = [text.tokens for text in texts]
            steps = 140 if build is overfit_eagle3 else 280
            place = tmp_path_factory.mktemp(name) / "drafter"
            folders[name] = build(place, target, spoken, steps=steps, **options)
        return folders[name]

    return folder


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a drafter with another config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    change(config)
    (to / "config.json").write_text(json.dumps(config))
    return to


def examined(folder: Path, target: Path, texts: Sequence[Text]) -> Report:
    """The report on a drafter's folder."""
    net, info = target_of(target, torch.float32)
    method = (
        "eagle3"
        if "eagle" in json.dumps(json.loads((folder / "config.json").read_text())).lower()
        else "dflash"
    )
    subject = SUBJECTS.get(method)(DraftConfig(method=method, model=str(folder)), info)
    return examine(subject, net, texts, info.device)


def test_every_network_can_be_checked() -> None:
    """A new network brings its self-test."""
    assert set(SUBJECTS) == set(NETWORKS)


@pytest.mark.parametrize(
    "name",
    ["dflash", "dflash-anchor", "dflash-causal", "eagle3", "eagle3-residual", "eagle3-output"],
)
def test_a_right_one_passes(made: Made, target: Path, texts: list[Text], name: str) -> None:
    """As configured it drafts what the target says, and nothing else does better."""
    report = examined(made(name), target, texts)
    assert report.outcome == "fits", report.advice
    own = report.trials[0]
    assert own.by_position[0] > 0.25
    assert all(t.accept_length < own.accept_length + 0.1 for t in report.trials[1:])
    if name.startswith("eagle3"):
        assert report.vocabulary is not None
        assert not report.vocabulary.wrong
        assert report.vocabulary.coverage > 0.9
        assert report.vocabulary.num_heard > 5


@pytest.mark.parametrize(
    "name, shift", [("dflash", 1), ("dflash", -1), ("eagle3", 1), ("eagle3", -1)]
)
def test_shifted_taps_are_named(
    made: Made, target: Path, texts: list[Text], tmp_path: Path, name: str, shift: int
) -> None:
    """Taps one layer off: the report names the shift back, and the layers to be named."""

    def change(config: dict[str, Any]) -> None:
        nested = config["dflash_config" if name == "dflash" else "eagle_config"]
        key = "target_layer_ids" if name == "dflash" else EAGLE_TAPS
        nested[key] = [tap + shift for tap in nested[key]]

    report = examined(changed(made(name), tmp_path / "drafter", change), target, texts)
    assert report.outcome == "misread"
    assert f"taps {-shift:+d}" in report.advice
    assert ("[1, 2]" if name == "dflash" else "[1, 2, 2]") in report.advice


@pytest.mark.parametrize("name, now", [("dflash", True), ("dflash-anchor", False)])
def test_the_other_layout_is_named(
    made: Made, target: Path, texts: list[Text], tmp_path: Path, name: str, now: bool
) -> None:
    """Rows that predict the token after them, read as their own, and the other way round."""
    folder = changed(
        made(name),
        tmp_path / "drafter",
        lambda config: config["dflash_config"].update(sample_from_anchor=now),
    )
    report = examined(folder, target, texts)
    assert report.outcome == "misread"
    assert f"sample_from_anchor: {str(not now).lower()}" in report.advice


def test_the_other_mask_is_named(
    made: Made, target: Path, texts: list[Text], tmp_path: Path
) -> None:
    """A drafter trained with a causal block, read as bidirectional."""
    folder = changed(
        made("dflash-causal"), tmp_path / "drafter", lambda config: config.update(is_causal=False)
    )
    report = examined(folder, target, texts)
    assert report.outcome == "misread", report.advice
    assert "is_causal: true" in report.advice


@pytest.mark.parametrize(
    "name, flag", [("eagle3-residual", "norm_before_residual"), ("eagle3-output", "norm_output")]
)
def test_norm_flags_are_named(
    made: Made, target: Path, texts: list[Text], tmp_path: Path, name: str, flag: str
) -> None:
    """A flag that no tensor shows is found by what it drafts."""
    folder = changed(made(name), tmp_path / "drafter", lambda config: config.pop(flag))
    report = examined(folder, target, texts)
    assert report.outcome == "misread", report.advice
    assert f"Set {flag}: true." in report.advice


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_a_drafter_of_another_target_is_named(made: Made, tmp_path: Path, name: str) -> None:
    """Of the same shape and vocabulary, so it loads; the figures say what it is."""
    other = tiny.write_tiny(tmp_path / "other", seed=9, num_hidden_layers=4)
    report = examined(made(name), other, answers(other))
    assert report.outcome == "another target", report.advice
    assert "trained for another target" in report.advice
    assert report.trials[0].by_position[0] < 0.15
    assert ("vocabulary map" in report.advice) == (name == "eagle3")


def test_a_map_of_another_target_is_named(
    made: Made, target: Path, texts: list[Text], tmp_path: Path
) -> None:
    """A valid map of the same size, counted on another text, under the right head."""
    folder = tmp_path / "drafter"
    shutil.copytree(made("eagle3"), folder)
    tensors = load_file(folder / "model.safetensors")
    count = len(tensors["d2t"])
    right = tensors["d2t"] + torch.arange(count)
    lacking = np.setdiff1d(np.arange(97), right.numpy())
    # One id less near the beginning, one more at the end: every row between is shifted by one.
    ids = torch.tensor(sorted({*right.tolist(), int(lacking[-1])} - {int(right[1])}))
    tensors["d2t"] = ids - torch.arange(count)
    tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill(0, ids, value=True)
    save_file(tensors, folder / "model.safetensors")
    report = examined(folder, target, texts)
    assert report.outcome == "wrong map", report.advice
    assert report.vocabulary is not None
    assert report.vocabulary.num_agreeing < report.vocabulary.num_heard / 2


def test_a_map_that_cannot_be_true_ends_the_loading(
    made: Made, target: Path, tmp_path: Path
) -> None:
    """Unsorted maps and maps that disagree are refused before anything is drafted."""
    folder = tmp_path / "drafter"
    shutil.copytree(made("eagle3"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = tensors["d2t"].flip(0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="d2t"):
        examined(folder, target, [])


def test_a_zero_mask_row_is_named(
    made: Made, texts: list[Text], target: Path, tmp_path: Path
) -> None:
    """The target never trained the mask's embedding: said as a finding, with the id."""
    blind = tmp_path / "target"
    shutil.copytree(target, blind)
    tensors = load_file(blind / "model.safetensors")
    tensors["model.embed_tokens.weight"][96] = 0
    save_file(tensors, blind / "model.safetensors", metadata={"format": "pt"})
    report = examined(made("dflash"), blind, texts)
    (warning,) = [f.text for f in report.findings if f.level == "warning"]
    assert "mask token 96 is zero" in warning


def test_what_it_was_made_for_is_said(
    made: Made, target: Path, texts: list[Text], tmp_path: Path
) -> None:
    """A shorter length is a note; another number of layers is a fault that ends the loading."""
    report = examined(made("dflash"), target, texts)
    assert [f.level for f in report.findings] == ["note"]
    assert "128 positions and the target has 256" in report.findings[0].text
    folder = changed(
        made("dflash"), tmp_path / "drafter", lambda config: config.update(num_target_layers=5)
    )
    with pytest.raises(ConfigError, match="number of target layers: 5 here, 4 in the target"):
        examined(folder, target, texts)
