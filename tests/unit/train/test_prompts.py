"""Prompt files: good lines, broken lines counted, named, skipped or refused; empty files said."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.train.prompts import Broken, Prompt, Reading, read_prompts

GOOD = {"messages": [{"role": "user", "content": "Hi."}], "category": "chat", "source": "s"}
BROKEN: dict[str, bytes] = {
    "no JSON": b'{"messages": [',
    "a JSON list": b"[1, 2]",
    "no list of messages, and no text": b'{"text": "x"}',
    "no list of messages": b'{"messages": {}, "prompt": "x"}',
    "message 0 is no object": b'{"messages": ["x"]}',
    "message 1 has no role or no content": json.dumps(
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "  "}]}
    ).encode(),
    "the last message is the assistant's": json.dumps(
        {"messages": [{"role": "assistant", "content": "x"}]}
    ).encode(),
    "codec can't decode": b'{"messages": "\xff"}',
    "unpaired surrogates": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
}


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def take(paths: list[Path], broken: Broken) -> tuple[list[Prompt], Reading]:
    reading = Reading()
    return list(read_prompts(paths, broken=broken, reading=reading)), reading


def test_good_lines_plain_and_gzipped(tmp_path: Path) -> None:
    """Both kinds of file, blank lines, keys that are not there."""
    bare = {"messages": GOOD["messages"]}
    plain = write(tmp_path / "a.jsonl", [json.dumps(GOOD).encode(), b"", json.dumps(bare).encode()])
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps({**GOOD, "licence": "MIT"}).encode()))
    prompts, reading = take([plain, zipped], "refuse")
    assert reading.num_prompts == 3
    assert [(p.group, p.licence, p.line) for p in prompts] == [
        ("chat", "not stated", 1),
        ("file", "not stated", 3),
        ("chat", "MIT", 1),
    ]


def test_lines_of_known_sets_of_prompts_are_read(tmp_path: Path) -> None:
    """What `bench` reads can be trained on: the first of `turns`, `question` and `prompt`."""
    rows = [
        {"turns": ["first", "second"], "category": "qa"},
        {"question": "how many?", "answer": "3"},
        {"prompt": "def f():", "task_id": "HumanEval/0"},
        {"turns": [], "prompt": "none of the turns"},
        {"messages": GOOD["messages"], "prompt": "not this"},
    ]
    path = write(tmp_path / "a.jsonl", [json.dumps(row).encode() for row in rows])
    prompts, _ = take([path], "refuse")
    said = [[(m["role"], m["content"]) for m in p.messages] for p in prompts]
    expected = ["first", "how many?", "def f():", "none of the turns", "Hi."]
    assert said == [[("user", text)] for text in expected]
    assert prompts[0].group == "qa"


@pytest.mark.parametrize("row", [{"turns": [[1]]}, {"prompt": 3}, {"question": " "}])
def test_a_known_key_without_text_is_broken(tmp_path: Path, row: dict[str, object]) -> None:
    """A key alone does not make a prompt."""
    path = write(tmp_path / "a.jsonl", [json.dumps(row).encode()])
    with pytest.raises(ConfigError, match="1 of 1 lines are no prompts"):
        take([path], "refuse")


@pytest.mark.parametrize("why", BROKEN)
def test_broken_lines_are_refused_by_name(tmp_path: Path, why: str) -> None:
    """The message counts them and says which line, and why."""
    path = write(tmp_path / "a.jsonl", [json.dumps(GOOD).encode(), BROKEN[why]])
    with pytest.raises(ConfigError) as error:
        take([path], "refuse")
    assert "1 of 2 lines are no prompts" in str(error.value)
    assert f"{path}:2: " in str(error.value)
    assert why in str(error.value)


def test_broken_lines_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them counted, some of them quoted, the good ones used."""
    lines = [*BROKEN.values(), json.dumps(GOOD).encode()]
    with caplog.at_level(logging.WARNING):
        prompts, reading = take([write(tmp_path / "a.jsonl", lines)], "skip")
    assert len(prompts) == 1
    assert len(reading.broken) == len(BROKEN)
    assert f"{len(BROKEN)} broken lines were skipped" in caplog.text
    assert f"and {len(BROKEN) - 5} more" in caplog.text


def test_an_empty_file_is_said(tmp_path: Path) -> None:
    """No line at all, and no good line, are errors with an example of a line."""
    with pytest.raises(ConfigError, match=r"no prompts: .*a\.jsonl holds no lines.*messages"):
        take([write(tmp_path / "a.jsonl", [b"", b"  "])], "skip")
    with pytest.raises(ConfigError, match="holds only broken lines"):
        take([write(tmp_path / "a.jsonl", [b"x"])], "skip")


@pytest.mark.parametrize("content", [None, b"\x1f\x8b damaged", b"\x1f\x8b"])
def test_unreadable_files_are_said(tmp_path: Path, content: bytes | None) -> None:
    """A missing file and a damaged archive."""
    path = tmp_path / "a.jsonl.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the prompts in"):
        take([path], "skip")
