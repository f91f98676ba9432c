"""`paceline train METHOD`: from prompts to an exported drafter, in a folder that remembers where it is."""

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

from paceline.cli.console import epilogue, in_paragraphs, notes
from paceline.cli.flags import spelled
from paceline.cli.workbench import command_line
from paceline.train.methods import SETTINGS
from paceline.train.progress import LogLines

TRAINERS = App(
    name="train",
    help="Train a drafter on answers that the target makes itself.",
    help_format="plaintext",
)
GO_ON = 3  # exit code: time was up, the same command goes on
_SUMMARY = """Train {article} {name} drafter: prepare prompts, generate answers, train, measure and export.

The first call says what the run is; later calls with the same folder go on with it. Exit code 3
says that --minutes are over and the same command goes on.
"""
_TITLES = {"dflash": ("a", "DFlash"), "eagle3": ("an", "EAGLE-3")}
_EXAMPLES = {
    "dflash": (
        "paceline train dflash runs/one --prompts mine.jsonl --answer-tokens 20000000 \\",
        "    --train-minutes 20",
        "paceline train dflash runs/one --minutes 9.5   (go on with it)",
        "paceline train dflash runs/two --own-share 1 --steps 2000 --init runs/one/export",
    ),
    "eagle3": (
        "paceline train eagle3 runs/one --prompts mine.jsonl --answer-tokens 20000000 \\",
        "    --train-minutes 6",
        "paceline train eagle3 runs/two --answers runs/one --train-minutes 6",
        "paceline train eagle3 runs/three --answers runs/one --init FOLDER --remap --steps 500",
    ),
}


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


def _command(name: str) -> Callable[..., int]:
    """The command that trains one kind of drafter, with the fields of its settings as flags."""
    settings = SETTINGS.get(name)
    hints = get_type_hints(settings)
    groups: dict[str, Group] = {}
    flags = []
    for number, item in enumerate(fields(settings)):
        title = str(item.metadata["group"])
        group = groups.setdefault(title, Group(title, sort_key=number))
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
        return _train(name, folder, {k: v for k, v in values.items() if v is not None})

    article, title = _TITLES[name]
    bound.__signature__ = signature  # type: ignore[attr-defined]
    bound.__annotations__ = {}
    bound.__name__ = name
    bound.__doc__ = in_paragraphs(_SUMMARY.format(article=article, name=title))
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
                show_default=(lambda _: spelled(default)) if shown_default else False,
                consume_multiple=True,
                negative_iterable=(),
            ),
        ],
    )


def _train(name: str, folder: Path, given: dict[str, object]) -> int:
    """Begin a run or go on with it; only flags that were given are in `given`."""
    from paceline.api.tokenizer import Tokenizer
    from paceline.train.claim import claimed
    from paceline.train.methods import METHODS
    from paceline.train.run import open_run
    from paceline.train.stages import go

    method = METHODS.get(name)
    command = shlex.join(command_line())
    with shown() as progress, claimed(folder):
        run = open_run(method.settings, folder, given, Tokenizer.from_files, progress, command)
        complete = go(run, method)
    console = notes()
    if not complete:
        console.print(f"time is up; everything is saved in {folder}, and the same command goes on")
        return GO_ON
    console.print(f"complete: {', '.join(run.settings.stages)} in {folder}")
    return 0


for _name in SETTINGS:
    TRAINERS.command(_command(_name), name=_name, help_epilogue=epilogue(_EXAMPLES[_name]))
