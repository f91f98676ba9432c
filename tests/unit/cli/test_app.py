from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys

import pytest

from paceline.cli import app, main
from paceline.core.errors import (
    ConfigError,
    EngineStoppedError,
    MemoryBudgetError,
    ModelError,
    RequestError,
    TemplateError,
)

COMMANDS = ("generate", "chat", "bench", "check", "doctor", "demo")


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def broken() -> object:
        raise error

    monkeypatch.setattr(app, "build_app", broken)
    return main([])


def test_an_interrupt_during_imports_is_one_line(monkeypatch, capsys) -> None:
    """They take most of a second, and nothing has begun then."""

    def importing(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", importing)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == "paceline: interrupted\n"


@pytest.mark.parametrize(
    "error,code",
    [
        (ConfigError("c"), 2),
        (MemoryBudgetError("m"), 2),
        (RequestError("r"), 2),
        (TemplateError("t"), 2),
        (ModelError("o"), 2),
        (EngineStoppedError("e"), 1),
        (OSError(28, "No space left on device"), 1),
        (MemoryError(), 1),
        (ValueError("v"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_every_error_is_one_message_and_a_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Users' mistakes are 2, failures 1, Ctrl-C 130; no traceback in any case."""
    assert fail_with(error, monkeypatch) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) == (0 if code == 141 else 1)


def test_an_internal_error_says_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of ours is called that, and its traceback can be had."""
    assert fail_with(ValueError("v"), monkeypatch) == 1
    assert "internal error: ValueError: v" in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_LOG", "debug")
    fail_with(ValueError("v"), monkeypatch)
    assert "Traceback" in capsys.readouterr().err


def fail_telling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> object:
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logging.getLogger(name).exception("a part failed")
        raise EngineStoppedError("stopped")

    monkeypatch.setattr(app, "build_app", failing)
    main([])


def test_tracebacks_of_the_log_stay_out_of_sight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What modules log with a traceback is one line for users."""
    fail_telling("paceline.somewhere", monkeypatch)
    assert capsys.readouterr().err == "paceline: ERROR: a part failed\npaceline: stopped\n"


def test_failures_of_a_server_are_told_with_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its clients are told that the log says more."""
    fail_telling("paceline.api.server.app", monkeypatch)
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_logging_is_left_as_it_was(run) -> None:
    """The program may be called from Python; it does not keep the process's logging."""
    logger = logging.getLogger("paceline")
    before = (list(logger.handlers), logger.level)
    run("generate", "x")
    assert (list(logger.handlers), logger.level) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """--help explains itself by example, and lists the speculation flags on every command."""
    words = [command, "lossless"] if command == "check" else [command]
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    for flag in ("--spec ", "--spec-nodes", "--speculative-config", "--model"):
        assert flag in out
    assert "\x1b" not in out


def test_the_program_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments there is help, not an error."""
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize(
    "argv,message",
    [
        (["genrate"], 'Did you mean "generate"'),
        (["generate", "x", "--max-lenn", "3"], "--max-lenn"),
        (["generate", "x", "--max-len", "many"], "many"),
        (["generate", "x", "y"], "y"),
        (["generate", "x", "--weights", "3bit"], '"4bit"'),
        (["generate", "x", "--max-tokens"], "--max-tokens"),
    ],
)
def test_misuse_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands, flags and values: exit code 2 and one message."""
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("paceline: ")


def hint(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_a_prompt_without_quotes_is_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Words that a shell took apart are the commonest mistake."""
    err = hint([command, "one", "two", "-"], capsys)
    assert "2 arguments too many: two -." in err
    assert f"The prompt is one argument: quote it, as in paceline {command}" in err


@pytest.mark.parametrize(
    "argv,command",
    [
        (["generate", "x", "--max-lenn", "3"], "paceline generate"),
        (["doctor", "x"], "paceline doctor"),
        (["check", "lossless", "--foo"], "paceline check lossless"),
        (["train", "dflash"], "paceline train dflash"),
        (["genrate"], "paceline"),
    ],
)
def test_a_mistake_names_the_help_that_helps(
    argv: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options stand in the help of the command, not of the program."""
    err = hint(argv, capsys)
    assert f"Try '{command} --help'." in err
    assert "quote it" not in err


@pytest.mark.parametrize("words", [("generate",), ("train", "dflash"), ("check", "lossless")])
def test_help_for_a_reader_that_leaves(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--help | head` ends as any other output to a closed pipe does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main([*words, "--help"]) == app.READER_GONE


@pytest.mark.parametrize(
    "words", [("check", "drafter"), ("train", "eagle3"), ("widen",), ("bench", "steps"), ("bench",)]
)
def test_paragraphs_of_help_are_broken_once(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A narrow terminal's breaks and the source's own together leave single words on lines."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out.partition("\n\n")[2].partition("╭")[0].strip()
    for paragraph in text.split("\n\n"):
        lines = [line.rstrip() for line in paragraph.splitlines()]
        for line, after in itertools.pairwise(lines):
            assert len(line) + 1 + len(after.split()[0]) > 80, (line, after)


def test_defaults_are_shown_as_one_would_type_them(capsys: pytest.CaptureFixture[str]) -> None:
    """No tuples of Python; and the default drafter is explained."""
    assert main(["train", "dflash", "--help"]) == 0
    assert main(["generate", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for default in ("prepare generate train finish", "0.0 0.0 0.7 1.0", "''", "suffix ddtree"):
        assert f"[default: {default}]" in out
    assert "auto: the network that comes with exactly this model, else suffix" in out


def test_the_package_can_be_run() -> None:
    """`python -m paceline`, for whoever has not the environment's programs on PATH."""
    command = [sys.executable, "-m", "paceline", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.strip()


def test_help_costs_no_torch_import() -> None:
    """`paceline --help` must answer at once."""
    code = (
        "import sys; from paceline.cli import main; main(['generate', '--help']); "
        "sys.stderr.write(str(sorted({'torch', 'numpy', 'jinja2', 'tokenizers'} & set(sys.modules))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == "[]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version alone, for scripts."""
    import paceline

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == paceline.__version__
