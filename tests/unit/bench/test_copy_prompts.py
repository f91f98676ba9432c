"""The prompts that copy text, behind figures in the README."""

from __future__ import annotations

import json
from collections import Counter

from paceline.api.tokenizer import Tokenizer
from tests import tiny_tokenizers


def test_copy_prompts_are_what_the_readme_says() -> None:
    """24 prompts, four of each of six kinds, short enough for a demo and long enough to copy."""
    file = tiny_tokenizers.ROOT / "benchmarks" / "prompts" / "copy.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["question_id"] for row in rows] == list(range(1, 25))
    kinds = Counter(row["category"] for row in rows)
    assert kinds == dict.fromkeys(("code", "json", "quote", "table", "list", "log"), 4)
    tokenizer = Tokenizer.from_files(tiny_tokenizers.bundled_file())
    for row in rows:
        assert set(row) == {"question_id", "category", "turns"}
        (prompt,) = row["turns"]
        assert 80 <= len(tokenizer.encode(prompt)) <= 350
