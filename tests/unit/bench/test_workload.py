from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from paceline.bench.prompts import BUILT_IN, DEMO_COPY
from paceline.bench.workload import load, plain
from paceline.core.errors import ConfigError

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorter."]},
    {"question_id": 82, "category": "coding", "turns": ["Write a loop."]},
    {"question_id": 300, "category": "qa", "turns": ["Who?"]},
    {"question_id": 301, "category": "qa", "turns": ["Where?"]},
]


def write(path: Path, rows: list[object]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_spec_bench_is_read_in_its_six_groups(tmp_path: Path) -> None:
    """The first turn counts, and MT-Bench's categories are one group, as papers report it."""
    found = load([write(tmp_path / "question.jsonl", SPEC_BENCH)])
    assert found.groups == ("mt_bench", "qa")
    assert [p.messages for p in found.prompts][:2] == [user("Write a poem."), user("Write a loop.")]
    assert [p.key for p in found.prompts][:2] == ["question/81", "question/82"]
    assert found.sources == ("question.jsonl",)


def test_other_sets_are_read(tmp_path: Path) -> None:
    """HumanEval (gzipped), GSM8K, chats and plain prompts, each in a group of its own."""
    paths = [
        write(tmp_path / "HumanEval.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": "def f():"}]),
        write(tmp_path / "gsm8k_test.jsonl", [{"question": "How many?", "answer": "3"}]),
        write(
            tmp_path / "chats.jsonl",
            [
                {
                    "category": "talk",
                    "messages": [
                        {"role": "system", "content": "Be brief."},
                        {"role": "user", "content": "Hi."},
                        {"role": "assistant", "content": "Hello."},
                        {"role": "user", "content": "Bye."},
                    ],
                }
            ],
        ),
        write(tmp_path / "plain.jsonl", [{"prompt": "Once"}]),
    ]
    found = load(paths)
    assert found.groups == ("humaneval", "gsm8k_test", "talk", "plain")
    assert found.prompts[0].messages == user("def f():")
    assert found.prompts[1].messages == user("How many?")
    assert [m["role"] for m in found.prompts[2].messages] == ["system", "user"]


def test_raw_prompts_have_no_messages(tmp_path: Path) -> None:
    """Raw means the text itself, for models and sets without a chat."""
    path = write(tmp_path / "h.jsonl", [{"task_id": "HumanEval/0", "prompt": "def f():"}])
    (prompt,) = load([path], raw=True).prompts
    assert (prompt.messages, prompt.text) == ((), "def f():")


def test_categories_and_limits_choose(tmp_path: Path) -> None:
    """Groups and categories are named alike; the limit counts per group, the first ones win."""
    path = write(tmp_path / "q.jsonl", SPEC_BENCH)
    assert len(load([path], categories=["mt_bench"]).prompts) == 2
    assert [p.category for p in load([path], categories=["coding"]).prompts] == ["coding"]
    assert [p.key for p in load([path], limit=1).prompts] == ["q/81", "q/300"]
    many = [
        {"question_id": i, "category": c, "turns": ["x"]}
        for i, c in enumerate(["writing"] * 3 + ["coding"] * 3 + ["stem"])
    ]
    spread = load([write(tmp_path / "m.jsonl", many)], limit=5)  # each category in turn
    assert [p.key for p in spread.prompts] == ["m/0", "m/1", "m/3", "m/4", "m/6"]
    with pytest.raises(ConfigError, match="no prompt has the category 'rag'; categories here: cod"):
        load([path], categories=["rag", "qa"])


def test_the_digest_knows_the_prompts_and_nothing_else(tmp_path: Path) -> None:
    """Equal prompts have equal digests wherever they lie; any other choice has another."""
    one = load([write(tmp_path / "a.jsonl", SPEC_BENCH)])
    (tmp_path / "b").mkdir()
    other = load([write(tmp_path / "b" / "q.jsonl.gz", SPEC_BENCH)])
    assert one.digest == other.digest
    assert one.digest != load([tmp_path / "a.jsonl"], limit=1).digest
    assert one.digest != load([tmp_path / "a.jsonl"], raw=True).digest


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", "line 2: .*each line is a JSON object"),
        ("[1]", "line 2: no JSON object"),
        ('{"text": "x"}', 'line 2: none of "turns"'),
        ('{"prompt": ""}', "line 2: none of"),
        ('{"turns": []}', "line 2: none of"),
        ('{"prompt": "x", "category": 3}', "category is no text"),
        ('{"messages": [{"role": "user"}]}', "without role or text"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no message of a user"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """File and line, what is wrong, and what is possible."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load([path])


def test_unreadable_and_empty_files_are_named(tmp_path: Path) -> None:
    """A missing file, a broken archive, bytes that are no text, a file without prompts."""
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("missing.jsonl", "broken.gz", "latin.jsonl"):
        with pytest.raises(ConfigError, match=f"cannot read prompts from .*{name}"):
            load([tmp_path / name])
    with pytest.raises(ConfigError, match="no prompts in"):
        load([tmp_path / "empty.jsonl"])


def test_built_in_prompts_are_user_messages() -> None:
    """What comes with the package needs no file."""
    found = plain(BUILT_IN)
    assert found.prompts[0].messages == user(DEMO_COPY)
    assert len({p.key for p in found.prompts}) == len(BUILT_IN)
