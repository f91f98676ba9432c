from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import paceline

PUBLIC = {"LLM", "EngineConfig", "SamplingParams", "__version__"}


def test_public_names_are_these() -> None:
    """A name is added to, or taken from, the public interface on purpose only."""
    assert set(paceline.__all__) == PUBLIC
    assert set(dir(paceline)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_resolve(name: str) -> None:
    """Every promised name can be imported, and only from its one home."""
    assert getattr(paceline, name) is not None


def test_unknown_name_says_what_there_is() -> None:
    """A misspelt import gets the names that exist."""
    with pytest.raises(AttributeError, match="public names: LLM"):
        paceline.Llm  # noqa: B018 (the access is what is tested)


def test_import_is_light() -> None:
    """`import paceline` may not cost a torch import: `paceline --help` must answer at once."""
    code = "import sys, paceline; print(sorted({'torch', 'numpy', 'jinja2'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_version_is_said_once() -> None:
    """The version users see is the one that was packaged."""
    assert paceline.__version__ == metadata.version("paceline")
