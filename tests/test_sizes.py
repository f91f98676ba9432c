from __future__ import annotations

from pathlib import Path, PurePosixPath

from tools import sizes


def test_no_file_is_over_the_hard_limit() -> None:
    """Files stay short enough to read: a file over budget is split before it grows."""
    assert sizes.measure().over(sizes.HARD) == []


def test_the_table_counts_what_is_there(tmp_path: Path) -> None:
    """The budget is of no use if the count is wrong."""
    folder = tmp_path / "src" / "paceline" / "kv" / "deep"
    folder.mkdir(parents=True)
    (folder / "pool.py").write_text("a\n" * 401)
    (folder / "pool.c").write_text("a\n" * 7)
    (folder / "notes.md").write_text("a\n" * 999)
    measured = sizes.measure(tmp_path)
    pool = PurePosixPath("src/paceline/kv/deep/pool.py")
    assert measured.over(sizes.HARD) == [(401, pool)]
    text = sizes.table(measured, {pool: 12})
    assert "src/paceline/kv" in text
    assert text.splitlines()[-1].split() == ["all", "2", "408", "+12"]
