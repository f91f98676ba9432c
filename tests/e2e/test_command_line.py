"""The installed program in processes of its own, on a tiny checkpoint: what only a process shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT = 120  # seconds until a hanging program fails the test


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with room for a long answer."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("long")
    tiny.write_tiny(folder, "llama", max_position_embeddings=16384)
    return str(folder)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def test_a_pipeline_in_and_out(model: str, tmp_path: Path) -> None:
    """Prompt from stdin, answer to a file, nothing on stderr, no escape sequences anywhere."""
    ran = subprocess.run(
        command(
            "generate",
            "--threads",
            "1",
            "--model",
            model,
            "--max-tokens",
            "12",
            "--seed",
            "1",
            "--json",
        ),
        input=b"the and of\n",
        capture_output=True,
        timeout=TIMEOUT,
        env=environment(),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stderr == b""
    assert b"\x1b" not in ran.stdout
    row = json.loads(ran.stdout)
    assert row["seed"] == 1
    assert len(row["token_ids"]) == 12


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    """`paceline generate ... | head -c 5` ends quietly and soon."""
    writer = subprocess.Popen(
        command(
            "generate",
            "the",
            "--threads",
            "1",
            "--model",
            model,
            "--max-tokens",
            "15000",
            "--ignore-eos",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    with writer:
        assert len(writer.stdout.read(5)) == 5
        writer.stdout.close()
        assert writer.wait(TIMEOUT) == 141
        assert writer.stderr.read() == b""


def test_ctrl_c_keeps_the_partial_answer(model: str) -> None:
    """SIGINT in mid-answer: exit code 130, the text so far, one line on stderr, no traceback."""
    writer = subprocess.Popen(
        command(
            "generate",
            "the",
            "--threads",
            "1",
            "--model",
            model,
            "--max-tokens",
            "15000",
            "--ignore-eos",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with writer:
        assert writer.stdout is not None
        start = writer.stdout.read(10)
        writer.send_signal(signal.SIGINT)
        out, err = writer.communicate(timeout=TIMEOUT)
        assert writer.returncode == 130
        assert err == b"paceline: interrupted\n"
        assert len(start + out) > 10
        assert out.endswith(b"\n")


def test_ctrl_c_while_loading(model: str) -> None:
    """An impatient user sees no traceback either."""
    writer = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            (
                "import os, signal, sys, threading\n"
                "import paceline.engine.engine as module\n"
                "def build(*_, **__):\n"
                "    os.kill(os.getpid(), signal.SIGINT)\n"
                "    threading.Event().wait(60)\n"
                "module.Engine.build = build\n"
                "from paceline.cli import main\n"
                "sys.exit(main(['generate', 'the']))\n"
            ),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with writer:
        out, err = writer.communicate(timeout=TIMEOUT)
        assert (writer.returncode, out, err) == (130, b"", b"paceline: interrupted\n")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_a_terminal_gets_remarks(model: str) -> None:
    """On a terminal the answer is followed by a remark; NO_COLOR keeps colours away."""
    from contextlib import suppress

    leader, follower = os.openpty()
    ran = subprocess.Popen(
        command(
            "generate",
            "the",
            "--threads",
            "1",
            "--model",
            model,
            "--max-tokens",
            "8",
            "--seed",
            "1",
        ),
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**environment(), "NO_COLOR": "1", "TERM": "xterm-256color"},
    )
    with ran:
        out, _ = ran.communicate(timeout=TIMEOUT)
        os.close(follower)
        remark = b""
        with suppress(OSError):  # the end of a pseudo-terminal
            while piece := os.read(leader, 4096):
                remark += piece
        os.close(leader)
    assert ran.returncode == 0
    assert out.endswith(b"\n")
    assert b"accept length" in remark
    assert b"\x1b[3" not in remark  # no colour
