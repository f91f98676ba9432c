"""`paceline bench steps` on tiny shapes, with the real engine; `paceline bench` beside it is tested in test_measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.core.errors import ConfigError
from tests import tiny, tiny_drafters


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    whole = tiny.write_tiny(tmp_path / "whole", "qwen3", max_position_embeddings=512)
    config = json.loads((whole / "config.json").read_text())
    for name, values in (("target", config), ("drafter", tiny_drafters.dflash_config(config))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    return tmp_path


def words(shapes: Path, *more: str) -> list[str]:
    return [
        *("bench", "steps", "--model", str(shapes / "target" / "config.json")),
        *("--random-weights", "--device", "cpu", "--dtype", "float32", "--threads", "1"),
        *(() if "--context" in more else ("--context", "24")),
        *("--repeats", "2", "--stage-steps", "2", "--steps", "2"),
        *more,
    ]


def test_a_record_and_a_table(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One JSON record is the last line of stdout, tables are on stderr, and a file can be had too."""
    from paceline.cost import hardware

    found = hardware.Hardware(name="here", read_bandwidth=1e10, matmul_rate=1e11)
    monkeypatch.setattr(hardware, "measure", lambda *_: found)
    out = shapes / "records" / "steps.json"
    code = main(
        words(
            shapes,
            *("--sequences", "1", "2", "--spec", "none", "--out", str(out)),
            *("--spec", f"dflash:{shapes / 'drafter'}", "--accept-length", "2.5"),
        )
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    record = json.loads(captured.out.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    keys = ("drafter", "block", "nodes", "sequences", "context")
    assert [tuple(row[k] for k in keys) for row in record["rows"]] == [
        ("none", None, 1, 1, 24),
        ("none", None, 1, 2, 24),
        ("dflash", 4, 4, 1, 24),
        ("dflash", 4, 4, 2, 24),
    ]
    assert all(row["ms_per_step"] > row["floor_ms"] > 0 for row in record["rows"])
    assert record["settings"]["synthetic_rates"] == [1.0, 0.5]
    assert record["model"]["random_weights"] is True
    assert record["ceilings"]["name"] == "here"
    assert "synthetic" in record["notes"][-1]
    assert "milliseconds a step" in captured.err
    assert "dflash, block 4" in captured.err


def test_a_time_below_its_floor_is_told(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceilings that were measured on a busy machine are too low; who reads the table is told."""
    from paceline.cost import hardware

    slow = hardware.Hardware(name="busy", read_bandwidth=1.0, matmul_rate=1.0)
    monkeypatch.setattr(hardware, "measure", lambda *_: slow)
    assert main(words(shapes, "--sequences", "1", "2")) == 0
    captured = capsys.readouterr()
    assert "times below their floors: 2;" in captured.err
    assert "--measure-ceilings" in json.loads(captured.out.splitlines()[-1])["notes"][-1]


@pytest.mark.parametrize(
    "more,message",
    [
        (("--sequences", "0"), "--sequences 0 must be >= 1"),
        (("--sequences", "0", "--warmup", "0"), "--warmup 0 must be >= 1; --sequences 0"),
        (("--accept-length", "0.5"), "--accept-length 0.5 must be 1"),
        (("--accept-rates", ".5,.6"), "do not rise"),
        (("--accept-rates", "a"), "cannot read --accept-rates 'a'"),
        (("--accept-rates", ".5", "--accept-length", "2"), "give one of them"),
        (("--spec", "suffix"), "unknown drafter 'suffix' to be measured"),
        (("--case", "2x30"), "give one or the other"),
        (("--context", "30", "600"), "the model's positions end at 512"),
        (("--context", "600"), "use shorter contexts (502 tokens at most), or fewer steps"),
        (("--warmup", "600"), "use fewer steps (--steps, --stage-steps, --warmup)"),
        (
            ("--sequences", "65537", "--page-size", "1"),
            "65537 sequences were asked for, and 65536 at most decode together",
        ),
    ],
)
def test_mistakes_are_told(
    shapes: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    """Exit code 2, and one message that says what is possible."""
    given = words(shapes, *more)
    assert main(given) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_cases_one_by_one() -> None:
    """Just those that are named, where all numbers at all contexts would not fit."""
    from paceline.bench.step_cases import Case, cases_of

    assert cases_of([], [], ["64x1024", "1x32768", "64x1024"]) == [
        Case(sequences=64, context=1024),
        Case(sequences=1, context=32768),
    ]
    assert cases_of([1, 2], [], []) == [Case(sequences=n, context=1024) for n in (1, 2)]
    for word in ("8", "8x", "x8", "0x8", "8x8x8", "8*8", "axb", f"1x{'9' * 5000}"):
        with pytest.raises(ConfigError, match="a case is SEQUENCESxCONTEXT"):
            cases_of([], [], [word])


def test_a_shape_needs_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a configuration; looking for its weights would end in a puzzling message."""
    assert main(["bench", "steps", "--model", "qwen3-8b"]) == 2
    assert "add --random-weights" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Of both commands; `bench` names `steps`."""
    assert main(["bench", "steps", "--help"]) == 0
    assert "--accept-length" in capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert "paceline bench prompts.jsonl" in text
    assert "steps" in text


def test_the_batch_invariant_mode_is_measured_too(
    shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cost is a difference of two records, and each says which one it is."""
    for flag, said in (("--batch-invariant", True), ("--no-batch-invariant", False)):
        assert main(words(shapes, "--spec", "none", flag)) == 0
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert record["config"]["batch_invariant"] is said
