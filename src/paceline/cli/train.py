"""`paceline train dflash`: from prompts to an exported drafter, in a folder that remembers where it is."""

from __future__ import annotations

import inspect
import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import App, Group, Parameter
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paceline.cli.console import epilogue, notes
from paceline.cli.workbench import command_line
from paceline.train.progress import LogLines
from paceline.train.settings import TrainSettings

TRAINERS = App(
    name="train",
    help="Train a drafter on answers that the target makes itself.",
    help_format="plaintext",
)
GO_ON = 3  # exit code: time was up, the same command goes on
_EXAMPLES = (
    "paceline train dflash runs/one --prompts prompts.jsonl.gz --answer-tokens 20000000 \\",
    "    --train-minutes 20",
    "paceline train dflash runs/one --minutes 9.5   (go on with it)",
    "paceline train dflash runs/two --own-share 1 --steps 2000 --init runs/one/export",
)


class Bars:
    """A bar per stage on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: float, total: float, note: str) -> None:
        """See `paceline.train.progress.Progress`."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, note="")
        task = self._tasks[what]
        self._progress.update(
            task, completed=done, total=total or None, description=what, note=note
        )


@contextmanager
def shown() -> Iterator[Bars | LogLines]:
    """Bars on a terminal; elsewhere lines in the log, which are then shown whatever PACELINE_LOG says."""
    console = notes()
    log = logging.getLogger("paceline.train")
    before = log.level
    log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    try:
        if not console.is_terminal:
            yield LogLines()
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as bars:
            yield Bars(bars)
    finally:
        log.setLevel(before)


def _flags(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the fields of `TrainSettings` as flags; only those given are passed on."""
    hints = get_type_hints(TrainSettings)
    groups: dict[str, Group] = {}
    flags = []
    for number, item in enumerate(fields(TrainSettings)):
        name = str(item.metadata["group"])
        group = groups.setdefault(name, Group(name, sort_key=number))
        flags.append(_flag(item, hints[item.name], group))
    run = inspect.Parameter(
        "run",
        inspect.Parameter.POSITIONAL_ONLY,
        annotation=Annotated[
            Path, Parameter(help="folder of the run; a run that is in it goes on")
        ],
    )
    signature = inspect.Signature([run, *flags])

    def bound(*args: object, **kwargs: object) -> int:
        values = dict(signature.bind(*args, **kwargs).arguments)
        folder = values.pop("run")
        return command(folder, {k: v for k, v in values.items() if v is not None})

    bound.__signature__ = signature  # type: ignore[attr-defined]
    bound.__annotations__ = {}
    bound.__name__ = command.__name__
    bound.__doc__ = command.__doc__
    return bound


def _flag(item: Field[Any], hint: Any, group: Group) -> inspect.Parameter:
    default = None if item.default is MISSING else item.default
    shown_default = default is not None and default != ()
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            hint | None,
            Parameter(
                name="--" + item.name.replace("_", "-"),
                group=group,
                help=str(item.metadata["help"]),
                show_default=(lambda _: str(default)) if shown_default else False,
                consume_multiple=True,
                negative_iterable=(),
            ),
        ],
    )


@_flags
def dflash(run: Path, given: dict[str, object]) -> int:
    """Train a DFlash drafter: prepare prompts, generate answers, train, measure and export.

    The first call says what the run is; later calls with the same folder go on with it. Exit code 3
    says that --minutes are over and the same command goes on.
    """
    from paceline.api.tokenizer import Tokenizer
    from paceline.train.run import go, open_run
    from paceline.train.train_dflash import finish, train

    with shown() as progress:
        opened = open_run(run, given, Tokenizer.from_files, progress, shlex.join(command_line()))
        complete = go(opened, train, finish)
    console = notes()
    if not complete:
        console.print(f"time is up; everything is saved in {run}, and the same command goes on")
        return GO_ON
    console.print(f"complete: {', '.join(opened.settings.stages)} in {run}")
    return 0


TRAINERS.command(dflash, name="dflash", help_epilogue=epilogue(_EXAMPLES))
