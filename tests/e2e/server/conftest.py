"""Two servers of one tiny model, for the whole run: with the suffix drafter, and without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from tests import tiny
from tests.blocking import CLIENTS, openai_client
from tests.browser import Page, asked, chromium, emulate, resize, said
from tests.byte_tokenizer import byte_tokenizer
from tests.server_process import ServerProcess, many_files, running

FLAGS = ("--served-model-name", "tiny", "--max-rows", "8")


def written(folder: Path, context: int) -> Path:
    tokenizer = byte_tokenizer()
    tiny.write_tiny(folder, max_position_embeddings=context, vocab_size=tokenizer.vocab_size + 6)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, but it can write any byte, so JSON too; a few of its ids have no token."""
    return written(tmp_path_factory.mktemp("model"), 1024)


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a long context: an answer that fills it takes minutes, so no test sees its end."""
    return written(tmp_path_factory.mktemp("long"), 65_536)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With drafts in every step, whether they pay on so small a model or not."""
    folder = tmp_path_factory.mktemp("server")
    with running(tiny_model, folder, "--spec", "suffix", "--no-adaptive", *FLAGS) as found:
        yield found


@pytest.fixture(scope="session")
def plain_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Without a drafter."""
    folder = tmp_path_factory.mktemp("plain")
    with running(tiny_model, folder, "--spec", "none", *FLAGS) as found:
        yield found


@pytest.fixture(scope="session")
def endless(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its answers need not end before a test does; it may hold thousands of connections, which may idle."""
    folder = tmp_path_factory.mktemp("endless")
    flags = ("--spec", "suffix", "--no-adaptive", "--drain-timeout", "0", *FLAGS)
    flags += ("--timeout-keep-alive", "3600")
    with many_files(), running(long_model, folder, *flags) as found:
        yield found


@pytest.fixture(params=CLIENTS)
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    """The official client; whoever asks for it is run with the sync and with the async one."""
    with openai_client(request.param, server.v1) as found:
        yield found


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests; each loads the page anew."""
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, server: ServerProcess) -> Iterator[Page]:
    """The page, freshly loaded, wide and light; nothing in it may have failed at the end."""
    emulate(browser, prefers_color_scheme="light")
    resize(browser, 1280, 900)
    said(browser)
    asked(browser)
    found = Page(browser, server.url)
    yield found
    assert said(browser) == []
    addresses = found.asked + [url for _, url in asked(browser)]
    assert addresses
    assert all(url.startswith(server.url) for url in addresses)
