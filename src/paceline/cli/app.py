"""The `paceline` program: its commands, and what every error becomes.

Exit codes: 0 good; 1 a failure, or a check that did not hold; 2 what was asked cannot be served;
130 Ctrl-C; 141 the reader of the output has gone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence

from cyclopts import App, CycloptsError, UnusedCliTokensError

import paceline
from paceline.cli import serve
from paceline.cli.console import (
    STDIN,
    PlainConsole,
    complain,
    epilogue,
    in_paragraphs,
    open_streams,
    silence_streams,
)
from paceline.cli.dotted import joined
from paceline.core import environment
from paceline.core.errors import (
    ConfigError,
    EngineStoppedError,
    ModelError,
    PacelineError,
    RequestError,
)

log = logging.getLogger(__name__)

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
READER_GONE = 141  # 128 + SIGPIPE, as for a program that the signal ends

# Their INFO is shown with warnings: it says what a start waits for.
_TELLING = (
    "paceline.api.server",
    "paceline.cli.serve",
    "paceline.engine.beforehand",
    "paceline.engine.fitness",
)

# Commands that take a prompt, which is one argument.
_OF_A_PROMPT = frozenset({"generate", "chat", "demo"})

# name -> ("module:function", examples shown by --help)
_COMMANDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "generate": (
        "paceline.cli.generate:generate",
        (
            'paceline generate "Once upon a time" --max-tokens 64',
            "cat notes.txt | paceline generate --spec ngram --spec-nodes 8",
            'paceline generate "Pick a colour:" --n 4 --seed 1 --json',
        ),
    ),
    "chat": (
        "paceline.cli.chat:chat",
        (
            "paceline chat",
            'paceline chat "Why is the sky blue?" --temperature 0',
            'git diff | paceline chat - --system "Describe this change."',
            "paceline chat --url http://localhost:8000",
        ),
    ),
    "serve": ("paceline.cli.serve:serve", serve.EXAMPLES),
    "bench": ("paceline.cli.bench:BENCH", ()),
    "check": ("paceline.cli.check:CHECKS", ()),
    "train": ("paceline.cli.train:TRAINERS", ()),
    "widen": (
        "paceline.cli.widen:widen",
        (
            "paceline widen wide --dry-run",
            "paceline widen wide",
            "paceline widen small --hidden-size 1152 --num-layers 32 --num-heads 18 --num-kv-heads 6 \\",
            "    --intermediate-size 3072 --dtype float32",
        ),
    ),
    "doctor": ("paceline.cli.doctor:doctor", ("paceline doctor", "paceline doctor --json")),
    "demo": ("paceline.cli.demo:demo", ("paceline demo", 'paceline demo "Repeat: a b c"')),
}


def build_app() -> App:
    """The command line's description."""
    app = App(
        name="paceline",
        help="Lossless speculative decoding: the same tokens, sooner.",
        version=paceline.__version__,
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        console=PlainConsole(),
    )
    for name, (target, examples) in _COMMANDS.items():
        module, _, attr = target.partition(":")
        command = getattr(importlib.import_module(module), attr)
        if isinstance(command, App):
            app.command(command, name=name)
        else:
            text = in_paragraphs(command.__doc__)
            app.command(command, name=name, help=text, help_epilogue=epilogue(examples))
    return app


def run(argv: Sequence[str]) -> int:
    """Run the program; every outcome is an exit code and at most one message on stderr."""
    open_streams()
    try:
        with _logging_to_stderr():
            code = _obey(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        code = READER_GONE
    except KeyboardInterrupt:
        code = INTERRUPTED
        complain("interrupted")
    silence_streams()
    return code


def _obey(argv: Sequence[str]) -> int:
    try:
        words = [STDIN if word == "-" else word for word in joined(argv)]
        outcome = build_app()(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        complain(_advice(error))
        return MISUSED
    except (ConfigError, RequestError, ModelError) as error:
        complain(str(error))
        return MISUSED
    except (EngineStoppedError, PacelineError, MemoryError) as error:
        complain(str(error) or type(error).__name__)
        return FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        complain(f"the system refused: {error}")
        return FAILED
    except Exception as error:
        log.debug("internal error", exc_info=True)
        complain(
            f"internal error: {type(error).__name__}: {error}. This is a fault of Paceline's; "
            "please report it with the traceback that PACELINE_LOG=debug shows."
        )
        return FAILED
    return outcome if isinstance(outcome, int) else 0


def _advice(error: CycloptsError) -> str:
    """What is wrong with the words given, and where the right ones stand."""
    chain = tuple(error.command_chain or ())
    command = " ".join(("paceline", *chain))
    reason = str(error)
    if isinstance(error, UnusedCliTokensError):
        words = error.unused_tokens or []
        shown = shlex.join("-" if word == STDIN else word for word in words)
        reason = f"{len(words)} argument{'s' * (len(words) != 1)} too many: {shown}."
        if chain and chain[0] in _OF_A_PROMPT:
            reason += f' The prompt is one argument: quote it, as in {command} "two words".'
    return f"{reason} Try '{command} --help'."


_SERVER = "paceline.api.server"


class _Formatter(logging.Formatter):
    """One line a record; tracebacks where somebody debugs, and of a server's own failures.

    Nobody can ask a server again what went wrong; its clients are told that the log says more.
    """

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__("paceline: %(levelname)s: %(message)s")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """A record as it is written."""
        if not self._tracebacks and not record.name.startswith(_SERVER):
            record = copy.copy(record)
            record.exc_info = record.exc_text = None
        return super().format(record)


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """PACELINE_LOG=debug|info|warning|error; warnings by default. As it was before, afterwards."""
    level = environment.log_level()
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(tracebacks=level <= logging.DEBUG))
    root = logging.getLogger("paceline")
    loggers = [root, *map(logging.getLogger, _TELLING)]
    before = [logger.level for logger in loggers]
    root.addHandler(handler)
    for logger in loggers:
        told = logger is not root and level == logging.WARNING
        logger.setLevel(logging.INFO if told else level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for logger, was in zip(loggers, before, strict=True):
            logger.setLevel(was)
