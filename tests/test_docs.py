"""The documentation is checked like code: its links, its examples, its prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from paceline.core import environment
from paceline.core.config import DraftConfig
from paceline.core.tree import from_proposals
from paceline.draft.base import HostCommit

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A page that links to a file that was moved misleads its reader."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if ":" not in link and not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_in_the_index() -> None:
    """Once: a page that nothing leads to is not read."""
    folder = ROOT / "docs"
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted([*linked, "README.md"]) == sorted(page.name for page in folder.glob("*.md"))


def test_the_documented_drafter_works() -> None:
    """Who copies the example of adding-a-drafter.md starts from something that runs."""
    text = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    scope: dict[str, type] = {"__name__": "mine"}
    exec(compile(code, "adding-a-drafter.md", "exec"), scope)
    drafter = scope["MineDrafter"](DraftConfig())
    drafter.join(3, [5, 6, 7], 2, "")
    drafter.observe(HostCommit(rows=[3], tokens=[[8, 9]]))
    proposals = drafter.propose([3, 3], [1, 0])
    assert [list(p.tokens) for p in proposals] == [[9], []]
    from_proposals([9, 9], proposals).check()
    drafter.leave(3, keep=True)


def test_the_prompt_samples_are_whole() -> None:
    """Figures in the README stand on exactly these prompts, with their original fields."""
    folder = ROOT / "benchmarks" / "prompts"
    questions = records(folder / "spec_bench.jsonl")
    groups = Counter("mt_bench" if q["category"] in CHAT else q["category"] for q in questions)
    assert groups == dict.fromkeys(
        ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 10
    )
    assert all(q["turns"] and {"question_id", "category", "turns"} <= q.keys() for q in questions)
    copies = records(folder / "copy.jsonl")
    assert len(copies) == 24
    assert all(c["turns"] and {"question_id", "category", "turns"} <= c.keys() for c in copies)
    problems = records(folder / "human_eval.jsonl")
    fields = {"task_id", "prompt", "entry_point", "canonical_solution", "test"}
    assert len(problems) == len({p["task_id"] for p in problems}) == 40
    assert all(p.keys() == fields for p in problems)


def test_every_environment_variable_is_in_one_module_and_in_the_readme() -> None:
    """A variable that only its author knows is no help to whoever debugs."""
    sources = [*(ROOT / "src").rglob("*.py")]
    readers = [p.stem for p in sources if re.search(r"environ\b|getenv", p.read_text("utf-8"))]
    assert readers == ["environment"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE) == list(environment.VARIABLES)
    module = (ROOT / "src/paceline/core/environment.py").read_text(encoding="utf-8")
    read = set(re.findall(r'environ\.get\("(PACELINE_\w+)"', module))
    assert read == set(environment.VARIABLES)
