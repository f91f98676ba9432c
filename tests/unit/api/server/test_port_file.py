"""The port's file: nothing of anybody else's is lost, and what cannot be written is told before a load."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.api.llm import LLM
from paceline.api.server import life, port_file
from paceline.api.server.app import create_app
from paceline.api.server.metrics import Metrics
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.cli import main
from paceline.core.errors import ConfigError
from tests.fake_engine import FakeEngine
from tests.served import TOKENIZER, ids


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A server takes its process's signals for good; here others need them afterwards."""
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_port_is_written_over_an_earlier_one(tmp_path: Path) -> None:
    """Which is forgotten first, so that whoever waits for the file does not read it."""
    file = tmp_path / "port"
    for port in (1, 65535):
        port_file.forget(str(file))
        assert not file.exists()
        port_file.write(str(file), port)
        assert file.read_text() == f"{port}\n"
    file.write_text("")  # as mktemp leaves it
    port_file.forget(str(file))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [port_file.check, port_file.forget])
def test_what_is_no_port_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function) -> None:
    """Text, bytes, folders, pipes, links, sockets: told, and left as they are."""
    (tmp_path / "text").write_text("precious")
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    (tmp_path / "long").write_text("1" * 1000 + "x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "port").write_text("8000\n")
    (tmp_path / "link").symlink_to(tmp_path / "port")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as left:
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        left.bind("socket")
    names = sorted(path.name for path in tmp_path.iterdir())
    for name in set(names) - {"port"}:
        with pytest.raises(ConfigError, match=r"cannot be written .*; name a new file"):
            function(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "text").read_text() == "precious"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even half a file beside it."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        port_file.write(str(tmp_path / "port"), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_half_file_of_another_is_left_alone(tmp_path: Path) -> None:
    """Nor written through, should it be a link."""
    precious, part = tmp_path / "precious", tmp_path / f"port.{os.getpid()}.part"
    precious.write_text("x")
    part.symlink_to(precious)
    with pytest.raises(ConfigError, match="cannot be written"):
        port_file.write(str(tmp_path / "port"), 1)
    assert precious.read_text() == "x"
    assert part.is_symlink()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `paceline serve` with what it refuses before a model is loaded."""

    def loaded(*_: object, **__: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("paceline.api.llm.LLM", loaded)

    def ask(*words: str) -> str:
        assert main(["serve", "--port", "0", *words]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        return told

    return ask


def test_mistakes_are_told_before_a_load(refused, tmp_path: Path) -> None:
    """One line each."""
    (tmp_path / "text").write_text("precious")
    assert "something else than a port" in refused("--port-file", str(tmp_path / "text"))
    assert "no regular file" in refused("--port-file", str(tmp_path))
    assert "there is no folder" in refused("--port-file", str(tmp_path / "no" / "port"))
    assert "no regular file" in refused("--port-file", "/dev/full")
    assert Path("/dev/full").is_char_device()
    both = ("--port-file", str(tmp_path / "port"), "--uds", str(tmp_path / "s"))
    assert "leave one of them out" in refused(*both)
    assert (tmp_path / "text").read_text() == "precious"


def test_another_servers_port_outlives_a_start_that_fails(refused, tmp_path: Path) -> None:
    """A model that is not there, or a template: the file is left to the server that runs."""
    file = tmp_path / "port"
    file.write_text("8000\n")
    assert "unknown model" in refused("--port-file", str(file), "--model", "/nowhere/at/all")
    assert "chat_template" in refused("--port-file", str(file), "--chat-template", "/nowhere")
    assert file.read_text() == "8000\n"


@pytest.mark.parametrize("name", ["nowhere/s", "x" * 200, "file"])
def test_a_unix_socket_that_cannot_be_is_told_with_its_own_advice(
    refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not with that of ports."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    told = refused("--uds", name)
    assert "cannot listen at the Unix socket" in told
    assert "name another --uds" in told
    assert "--host" not in told
    assert (tmp_path / "file").read_text() == "precious"


def test_a_start_that_fails_leaves_no_socket(refused, tmp_path: Path, monkeypatch) -> None:
    """Its place is taken before the model is loaded."""
    monkeypatch.chdir(tmp_path)
    assert "unknown model" in refused("--uds", "s", "--model", "/nowhere/at/all")
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_is_no_name_is_told(refused) -> None:
    """Python's own refusal of it is no OSError."""
    assert "cannot listen at a..b port 0" in refused("--host", "a..b")


def test_a_server_that_cannot_say_its_port_ends_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason is raised, and asyncio has nothing to complain about."""

    def ready() -> None:
        msg = "the disk is full"
        raise ConfigError(msg)

    settings = ServerSettings(port=0, served_model_name=("tiny",))
    listening = life.bound(settings)
    with LLM.from_engine(FakeEngine(ids("abc")), TOKENIZER) as llm:
        metrics = Metrics("tiny")
        service = Service(llm, settings, listener=metrics)
        app = create_app(service, metrics=metrics)
        with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="the disk is full"):
            life.Life(app, service, listening, ready=ready).run()
        gc.collect()  # a task that was left would say so
    assert caplog.record_tuples == []
