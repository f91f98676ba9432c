"""What every test gets: one thread, a cache folder of the run's own, tiny checkpoints on request.

`tests` is a package, so that a test says `from tests import tiny`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import pytest
import torch

from tests import skip_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

# No deadlines: a busy machine fails no test. In CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("PACELINE_CI") == "1" else "local")

_PREFIX = "paceline-tests-"
_made: pytest.StashKey[Path] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Point PACELINE_CACHE to a folder of this run, unless the caller chose one.

    Before anything else, so that subprocesses and xdist's workers inherit it: native kernels are
    compiled, and the default model converted, once a run. Tests never touch the user's own cache.
    """
    # A run started in the background inherits an ignored Ctrl-C, and so would every child of it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(skip_policy, "paceline-skip-policy")
    if "PACELINE_CACHE" not in os.environ:
        _sweep()
        config.stash[_made] = Path(tempfile.mkdtemp(prefix=_PREFIX))
        os.environ["PACELINE_CACHE"] = str(config.stash[_made])


def _sweep() -> None:
    """Remove the folders of runs that were killed over a day ago."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 24 * 3600:
                shutil.rmtree(folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what `pytest_configure` made."""
    made = config.stash.get(_made, None)
    if made is not None:
        del os.environ["PACELINE_CACHE"]
        shutil.rmtree(made, ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first; skip tests marked `gpu` where there is none.

    A long test that begins last has one worker busy and the others idle. Whole files move, or what
    their tests share would be made twice; the order is otherwise what it was, random as a rule.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def cache_dir() -> Path:
    """The run's cache folder. A test of caching itself sets PACELINE_CACHE to one of its own."""
    return Path(os.environ["PACELINE_CACHE"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, so that sums have one order and workers share the cores; restored after a test."""
    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() == dtype, "a test changed torch's default dtype"


class TinyCheckpoint(Protocol):
    """Asks for a tiny checkpoint: an architecture and `write_tiny`'s options."""

    def __call__(self, architecture: str, **options: Any) -> Path:
        """Folder of the checkpoint, in Hugging Face layout; read-only by agreement."""
        ...


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Tiny random checkpoints, each written once a session."""
    folders: dict[tuple[str, str], Path] = {}

    def checkpoint(architecture: str, **options: Any) -> Path:
        from tests import tiny

        key = (architecture, repr(sorted(options.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(architecture)
            tiny.write_tiny(folder, architecture, **options)
            folders[key] = folder
        return folders[key]

    return checkpoint
