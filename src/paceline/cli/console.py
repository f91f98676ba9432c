"""Standard streams: answers on stdout, everything else on stderr; bars and colours on terminals only.

rich respects NO_COLOR and finds out by itself whether a stream is a terminal.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paceline.core.errors import ConfigError, RequestError

# What "-" is turned into before flags are parsed, where it would look like one; no argument of a
# process can hold a NUL.
STDIN = "\0stdin"

# What moves a cursor, renames a window or rings on a terminal; lines and tabs do no harm.
_CONTROLS = {n: "\ufffd" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}


class PlainConsole(Console):
    """A console that leaves a reader who has gone to `app.run`, where rich would end the program with 1."""

    def on_broken_pipe(self) -> None:
        """Raise again what rich has caught."""
        raise BrokenPipeError


def notes() -> Console:
    """Where tables, progress and remarks go: stderr."""
    console = PlainConsole(stderr=True, highlight=False)
    if not console.is_terminal:  # a file gets whole lines, not what fits 80 columns
        console = PlainConsole(stderr=True, highlight=False, soft_wrap=True, width=160)
    return console


def harmless(text: str, stream: TextIO) -> str:
    """Text of a model or a server as it may be written: a terminal would obey what it holds of controls.

    Args:
        text: from outside.
        stream: where it goes; a file or a pipe gets it as it is.
    """
    return text.replace("\r\n", "\n").translate(_CONTROLS) if stream.isatty() else text


def say(text: str) -> None:
    """Write a part of an answer at once."""
    sys.stdout.write(harmless(text, sys.stdout))
    sys.stdout.flush()


def remark_on(text: str) -> None:
    """Say on stderr how an answer was made."""
    notes().print(harmless(text, sys.stderr), style="dim", markup=False)


def complain(message: str) -> None:
    """Say what is wrong, on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(harmless(f"paceline: {message}", sys.stderr), file=sys.stderr)


def epilogue(examples: Sequence[str]) -> str | None:
    """Examples as `--help` shows them."""
    return "\n".join(["Examples:", "", *(f"  {e}" for e in examples)]) if examples else None


def in_paragraphs(doc: str | None) -> str:
    """A docstring with a line per paragraph, so that a narrow terminal breaks lines only once."""
    paragraphs = inspect.cleandoc(doc or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr if that is a terminal; yields (done, total) -> None."""
    console = notes()
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def waiting(what: str, then: str) -> Iterator[Callable[[int, int], None]]:
    """A sign on stderr that something is waited for, until a call of what it yields makes a bar of it.

    Args:
        what: is waited for at first.
        then: what (done, total) counts.
    """
    with contextlib.ExitStack() as shown:
        shown.enter_context(notes().status(what))
        bar: Callable[[int, int], None] | None = None

        def advance(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                shown.pop_all().close()  # a terminal shows one at a time
                bar = shown.enter_context(progress(then))
            bar(done, total)

        yield advance


def read_prompt(prompt: str | None) -> str:
    """The prompt given, or what stands on stdin: for "-", or for none if stdin is no terminal.

    Raises:
        RequestError: it is empty, or not text.
        ConfigError: there is none.
    """
    if sys.stdin is None and prompt in {None, STDIN}:
        msg = "no prompt: standard input is closed; give one as an argument"
        raise ConfigError(msg)
    if prompt is None and sys.stdin.isatty():
        msg = "no prompt: give one as an argument, or on standard input"
        raise ConfigError(msg)
    if prompt in {None, STDIN}:
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            msg = f"the prompt on standard input is no UTF-8 text ({error}); convert it first"
            raise RequestError(msg) from error
        prompt = prompt.removesuffix("\n")
    if not prompt:
        msg = "the prompt is empty; give some text as an argument, or on standard input"
        raise RequestError(msg)
    return prompt


def open_streams() -> None:
    """Make closed streams /dev/null, and let unprintable characters be replaced, not raise."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")


def silence_streams() -> None:
    """After a reader has gone: let what Python still writes at exit vanish without a complaint."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
