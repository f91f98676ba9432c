"""Before an engine serves a drafter network, it learns whether the two belong together; once per pair."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams
from paceline.draft import shipped
from paceline.draft.shipped import Shipped
from paceline.engine import fitness
from paceline.engine.engine import Engine
from paceline.engine.fitness import Probes
from paceline.models.cache import folder_digest
from tests import tiny
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import overfit_dflash
from tests.tiny_eagle3 import overfit_eagle3

PROMPTS = [[(11 * i * j) % 60 + 3 for i in range(3 + j % 5)] for j in range(1, 9)]
PROBES = Probes(prompts=PROMPTS, stop_ids=frozenset())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four layers, so that taps have neighbours."""
    return tiny.write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def dflash(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that half knows what the target says."""
    place = tmp_path_factory.mktemp("dflash") / "drafter"
    spoken = [t.tokens for t in fitness.answers(plain(target), PROBES, 48)]
    taps = {"target_layer_ids": [1, 2]}
    return overfit_dflash(place, target, spoken, steps=280, dflash_config=taps)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's outcomes are kept."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(fitness, "cache_folder", lambda: folder)
    return folder


def plain(target: Path, **options: str) -> Engine:
    return engine(target, method="none", num_speculative_tokens=0, **options)


class Asked:
    """Brings the probes and counts how often they were needed."""

    def __init__(self, probes: Probes = PROBES) -> None:
        self.probes, self.times = probes, 0

    def __call__(self) -> Probes:
        self.times += 1
        return self.probes


def served(target: Path, folder: Path, asked: Asked, method: str = "dflash", **options) -> Engine:
    """An engine as a server builds it."""
    build: Callable[..., Engine] = lambda config: Engine.build(config, probes=asked)  # noqa: E731
    return engine(target, build, method=method, model=str(folder), dtype="float32", **options)


def randomised(folder: Path, to: Path) -> Path:
    """A copy with other matrices of the same sizes."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    tensors = load_file(file)
    noise = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and tensor.is_floating_point():
            tensors[name] = torch.randn(tensor.shape, generator=noise) * tensor.std()
    save_file(tensors, file)
    return to


@pytest.mark.parametrize("method", ["dflash", "ddtree", "merged"])
def test_one_that_fits_is_tested_once_and_serves(
    target: Path, dflash: Path, cache: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """The figures are a note; the second start asks nothing; tokens are those of plain decoding."""
    asked = Asked()
    with caplog.at_level(logging.INFO, "paceline.engine.fitness"):
        first = served(target, dflash, asked, method)
        assert "testing whether" in caplog.text
        assert "fits: " in caplog.text
        caplog.clear()
        again = served(target, dflash, asked, method)
        assert not [r for r in caplog.records if r.name == "paceline.engine.fitness"]
    assert asked.times == 1
    (kept,) = (cache / "fitness").iterdir()
    assert json.loads(kept.read_text())["outcome"] == "fits"
    for eng in (first, again):
        (note,) = [n for n in eng.notes if str(dflash) in n]
        assert "fits: " in note
        assert "accept length" in note
    assert first.report()["num_emitted"] == 0  # what the test decoded is not on its books
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    jobs = [request(str(i), p, params) for i, p in enumerate(PROMPTS[:3])]
    one, other = run(first, jobs), run(plain(target, dtype="float32"), jobs)
    assert {k: v.tokens for k, v in one.items()} == {k: v.tokens for k, v in other.items()}


def test_one_of_another_target_is_refused_with_the_figures(dflash: Path, tmp_path: Path) -> None:
    """It loads, and would draft in vain; also from what was kept, without another test."""
    other, asked = tiny.write_tiny(tmp_path / "other", seed=9, num_hidden_layers=4), Asked()
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            served(other, dflash, asked)
        said = str(caught.value)
        assert "does not belong to this model (another target): " in said
        assert "% of first drafts are what the target says, accept length 1." in said
        assert "--spec-check off" in said
    assert asked.times == 1


def test_a_randomised_copy_is_refused_and_may_be_served_all_the_same(
    target: Path, dflash: Path, tmp_path: Path, cache: Path
) -> None:
    """What the digests tell apart the test tells apart too; `check` leaves it out."""
    folder = randomised(dflash, tmp_path / "copy")
    with pytest.raises(ConfigError, match="another target"):
        served(target, folder, Asked(), "merged")
    shutil.rmtree(cache / "fitness")
    asked = Asked()
    served(target, folder, asked, check="off")
    served(target, folder, asked, num_speculative_tokens=0)
    assert asked.times == 0


def test_a_wrong_map_is_refused(
    target: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The right head under a map of the same size that belongs to another: named as that."""
    spoken = [t.tokens for t in fitness.answers(plain(target), PROBES, 48)]
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 2], "use_aux_hidden_state": True}
    right = overfit_eagle3(tmp_path / "right", target, spoken, steps=140, eagle_config=taps)
    assert any("fits: " in note for note in served(target, right, Asked(), "eagle3").notes)
    wrong = tmp_path / "wrong"
    shutil.copytree(right, wrong)
    tensors = load_file(wrong / "model.safetensors")
    count = len(tensors["d2t"])
    ids = tensors["d2t"] + torch.arange(count)
    lacking = max(set(range(97)) - set(ids.tolist()))
    ids = torch.tensor(sorted({*ids.tolist(), lacking} - {int(ids[1])}))
    tensors["d2t"] = ids - torch.arange(count)
    tensors["t2d"] = torch.zeros(97, dtype=torch.bool).index_fill(0, ids, value=True)
    save_file(tensors, wrong / "model.safetensors")
    with pytest.raises(ConfigError, match=r"\(wrong map\).*accept length.*d2t"):
        served(target, wrong, Asked(), "eagle3")


def test_one_that_is_misread_serves_with_a_warning(
    target: Path, dflash: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Taps one layer off: what to change is a note and a warning, at every start."""
    folder = tmp_path / "shifted"
    shutil.copytree(dflash, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [2, 3]
    (folder / "config.json").write_text(json.dumps(config))
    asked = Asked()
    for _ in range(2):
        caplog.clear()
        eng = served(target, folder, asked)
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warning in eng.notes
        assert "misread: " in warning
        assert "Name the outputs of layers [1, 2]" in warning
    assert asked.times == 1


@pytest.mark.parametrize("damage", ["{", "[]", "other pair", "other outcome"])
def test_a_damaged_cache_costs_a_test(target: Path, dflash: Path, cache: Path, damage: str) -> None:
    """Whatever lies there: it is tested anew, and what lay there is replaced."""
    served(target, dflash, Asked())
    (kept,) = (cache / "fitness").iterdir()
    good = json.loads(kept.read_text())
    if damage == "other pair":
        damage = json.dumps(good | {"drafter": "0" * 64, "outcome": "another target"})
    elif damage == "other outcome":
        damage = json.dumps(good | {"outcome": "splendid"})
    kept.write_text(damage)
    asked = Asked()
    served(target, dflash, asked)
    assert asked.times == 1
    assert json.loads(kept.read_text()) == good
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]  # nothing half written


def test_a_cache_that_cannot_be_written_costs_a_test_each_start(
    target: Path, dflash: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the folder's place, and no cache folder at all."""
    (cache / "fitness").write_text("in the way")
    asked = Asked()
    served(target, dflash, asked)
    served(target, dflash, asked)

    def none() -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(fitness, "cache_folder", none)
    served(target, dflash, asked)
    assert asked.times == 3


def test_one_that_comes_along_costs_nothing(
    target: Path, dflash: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A drafter is known by what lies in its folder, wherever that is; a changed copy is not."""
    known = Shipped(
        target="it", sha256="", folder=dflash, methods=("dflash",), digest=folder_digest(dflash)
    )
    its = folder_digest(target)
    monkeypatch.setattr(shipped, "find", lambda sha, places=None: [known] if sha == its else [])
    copy, asked = tmp_path / "elsewhere", Asked()
    shutil.copytree(dflash, copy)
    served(target, dflash, asked)
    served(target, copy, asked)
    assert asked.times == 0
    assert not any(cache.iterdir())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 99}))
    served(target, copy, asked)
    assert asked.times == 1
    with pytest.raises(ConfigError, match="another target"):
        served(target, randomised(dflash, tmp_path / "changed"), asked)
    assert asked.times == 2


def test_one_that_cannot_be_tested_serves_with_a_warning(
    target: Path, dflash: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts that fill the context window, or none at all: said, and not kept as an outcome."""
    for prompts in ([], [[5] * 400]):
        caplog.clear()
        served(target, dflash, Asked(Probes(prompts=prompts, stop_ids=frozenset())))
        assert "could not be tested" in caplog.text
    assert not (cache / "fitness").exists()


def test_without_probes_and_without_a_network_there_is_no_test(
    target: Path, dflash: Path, cache: Path
) -> None:
    """Training builds engines of drafters that know nothing yet; host drafters know no target."""
    engine(target, Engine.build, method="dflash", model=str(dflash))
    asked = Asked()
    for method in ("suffix", "none"):
        engine(target, lambda c: Engine.build(c, probes=asked), method=method)
    engine(target, lambda c: Engine.build(c, probes=asked), method="merged", parts=("suffix",))
    assert asked.times == 0
    assert not any(cache.iterdir())
