from __future__ import annotations

import asyncio
import inspect
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
EXPECTED = {
    "generate.py": "accept length",
    "stream.py": "ended by",
    "chat.py": "> Now name a vegetable.",
    "batch_with_seed.py": "without drafts the same: True",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(path: Path, tiny_checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """What the examples show works, on a tiny checkpoint."""
    main = runpy.run_path(str(path))["main"]
    outcome = main(str(tiny_checkpoint("llama")))
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)
    assert EXPECTED[path.name] in capsys.readouterr().out
