"""`python -m paceline.train METHOD RUN`: the command line without the packages that draw it.

For machines that have PyTorch and little else; `paceline train` is the same with bars.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import types
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import PacelineError
from paceline.train.claim import claimed
from paceline.train.methods import METHODS, SETTINGS
from paceline.train.progress import LogLines
from paceline.train.run import open_run
from paceline.train.settings import TrainSettings
from paceline.train.stages import go

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0: complete, 1: failed, 2: cannot be done as asked, 3: call again."""
    given = vars(parser().parse_args(argv))
    folder, method = given.pop("run"), METHODS.get(given.pop("method"))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    command = shlex.join(["python", "-m", "paceline.train", *(argv or sys.argv[1:])])
    try:
        with claimed(folder):
            run = open_run(
                method.settings, folder, given, Tokenizer.from_files, LogLines(), command
            )
            complete = go(run, method)
    except (PacelineError, OSError) as error:
        log.error("%s", error)  # noqa: TRY400 (messages for people)
        return 1 if isinstance(error, OSError) else 2
    if not complete:
        log.info("time is up; everything is saved in %s, and the same command goes on", folder)
        return 3
    return 0


def parser() -> argparse.ArgumentParser:
    """A word for each kind of drafter, its flags made from its settings; only those given result."""
    made = argparse.ArgumentParser(
        prog="python -m paceline.train",
        description="Train a drafter: prepare prompts, generate answers, train, measure and export.",
        allow_abbrev=False,
    )
    kinds = made.add_subparsers(dest="method", required=True, help="kind of drafter")
    for name in SETTINGS:
        kind = kinds.add_parser(name, argument_default=argparse.SUPPRESS, allow_abbrev=False)
        _add_flags(kind, SETTINGS.get(name))
    return made


def _add_flags(made: argparse.ArgumentParser, settings: type[TrainSettings]) -> None:
    made.add_argument("run", type=Path, help="folder of the run; a run that is in it goes on")
    hints = get_type_hints(settings)
    groups: dict[str, Any] = {}
    for item in fields(settings):
        name = str(item.metadata["group"])
        if name not in groups:
            groups[name] = made.add_argument_group(name)
        text = str(item.metadata["help"]).replace("%", "%%")
        shown: Any = item.default
        shown = shlex.join(map(str, shown)) if isinstance(shown, tuple) else shown
        default = "" if item.default in (None, ()) else f" (default: {shown})"
        groups[name].add_argument(
            "--" + item.name.replace("_", "-"), help=text + default, **_kind(hints[item.name])
        )


def _kind(hint: Any) -> dict[str, Any]:
    """argparse's words for a field's type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        return {"type": get_args(hint)[0], "nargs": "+", "action": _Tuple}
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint))}
    return {"type": hint}


class _Tuple(argparse.Action):
    """Several values as a tuple, which is what settings hold."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 (argparse's signature)
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002 (argparse's signature)
    ) -> None:
        """Store them."""
        setattr(namespace, self.dest, tuple(values))


if __name__ == "__main__":
    sys.exit(main())
