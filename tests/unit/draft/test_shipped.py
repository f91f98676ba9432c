"""Drafters that come with the project: found by the target's digest, and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import ModelError
from paceline.draft import NETWORKS, shipped
from paceline.models.cache import folder_digest

ENTRY = {"target": "a model", "sha256": "ab", "folder": "one", "methods": ["ddtree", "dflash"]}


def place(tmp_path: Path, *entries: dict[str, object]) -> Path:
    (tmp_path / "index.json").write_text(json.dumps({"drafters": entries}))
    for entry in entries:
        (tmp_path / str(entry["folder"])).mkdir(exist_ok=True)
    return tmp_path


def test_only_the_target_s_own_digest_finds_a_drafter(tmp_path: Path) -> None:
    """Another file gets none, and neither does a folder that is not there."""
    here = place(tmp_path, ENTRY, ENTRY | {"folder": "two", "methods": ["eagle3"]})
    found = shipped.find("ab", (here,))
    assert [d.folder for d in found] == [tmp_path / "one", tmp_path / "two"]
    assert found[0].methods == ("ddtree", "dflash")
    assert shipped.find("ac", (here,)) == []
    (tmp_path / "one").rmdir()
    assert [d.folder.name for d in shipped.find("ab", (here,))] == ["two"]


def test_the_first_place_that_has_one_wins(tmp_path: Path) -> None:
    """What was installed goes before what lies beside it; places without an index are passed over."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        place(tmp_path / name, ENTRY)
    (tmp_path / "nothing").mkdir()
    places = (tmp_path / "nothing", tmp_path / "b", tmp_path / "a")
    assert [d.folder for d in shipped.find("ab", places)] == [tmp_path / "b" / "one"]


@pytest.mark.parametrize("text", ["{", "[]", '{"drafters": [{"target": "x"}]}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    """Which file it is, and that a drafter can be named instead."""
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json.*--spec"):
        shipped.find("ab", (tmp_path,))


def test_a_drafter_is_known_by_target_and_contents(tmp_path: Path) -> None:
    """Both digests must agree; an entry without one knows none."""
    here = place(tmp_path, ENTRY | {"digest": "cd"}, ENTRY | {"folder": "two"})
    assert shipped.is_shipped("ab", "cd", (here,))
    assert not shipped.is_shipped("ac", "cd", (here,))
    assert not shipped.is_shipped("ab", "ce", (here,))


def test_the_project_s_own_index_names_drafters_that_exist() -> None:
    """Every entry has its folder, and methods that are registered."""
    index = next(f / "index.json" for f in shipped.folders() if (f / "index.json").is_file())
    entries = json.loads(index.read_text())["drafters"]
    assert entries
    for entry in entries:
        found = shipped.find(entry["sha256"])
        assert entry["folder"] in [d.folder.name for d in found]
        assert set(entry["methods"]) <= set(NETWORKS)
        assert (index.parent / entry["folder"] / "card.md").is_file()
        assert all(f.stat().st_size <= 16e6 for f in (index.parent / entry["folder"]).iterdir())
        assert shipped.is_shipped(entry["sha256"], folder_digest(index.parent / entry["folder"])), (
            f"{entry['folder']} has changed: its digest in {index} must follow"
        )


def test_the_project_s_own_drafters_are_small() -> None:
    """They are in every clone and in the wheel: 45 MB in all."""
    place = next(f for f in shipped.folders() if (f / "index.json").is_file())
    assert sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) <= 45e6
