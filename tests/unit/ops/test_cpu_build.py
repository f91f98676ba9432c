"""Compiling the kernels: once, atomically, for this processor; and every way in which it can fail."""

from __future__ import annotations

import os
import platform
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.ops.cpu import build as building
from paceline.ops.cpu import native as loading
from paceline.ops.cpu.build import Built, build, find_compiler
from paceline.ops.cpu.native import native, refusal
from paceline.ops.dispatch import OPS, explain

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


def compiler(folder: Path, script: str) -> str:
    """A command that stands for a C compiler."""
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


COUNTS = """if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi
for last; do :; done
echo run >> {log}
echo not a library > "$last"
"""


def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    """The second call finds the first one's file: no second start pays for it."""
    command = compiler(tmp_path, COUNTS.format(log=tmp_path / "log"))
    folder = tmp_path / "cache"
    first = build(folder, compiler=command)
    assert first.path is not None
    assert first.compiler == "fake 1.0"
    runs = len((tmp_path / "log").read_text().splitlines())
    assert build(folder, compiler=command) == first
    assert len((tmp_path / "log").read_text().splitlines()) == runs
    names = {path.suffix for path in folder.iterdir()}
    assert names == {".so", ".sha256"}


def test_what_a_killed_compilation_left_is_swept(tmp_path: Path) -> None:
    """Old remains go with the next compilation; what may belong to a live process stays."""
    folder = tmp_path / "cache"
    old, young = folder / ".compiling-old", folder / ".compiling-young"
    for remains in (old, young):
        remains.mkdir(parents=True)
        (remains / "rows.o").write_bytes(b"x")
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    command = compiler(tmp_path, COUNTS.format(log=tmp_path / "log"))
    assert build(folder, compiler=command).path is not None
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {".compiling-young"}


def test_another_source_flag_or_processor_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared home folder may serve different machines and versions of the package."""
    command = compiler(tmp_path, COUNTS.format(log=tmp_path / "log"))
    folder = tmp_path / "cache"
    paths = {build(folder, compiler=command).path, build(folder, compiler=command, tuning=()).path}
    monkeypatch.setattr(building, "cpu_features", lambda: "another processor")
    paths.add(build(folder, compiler=command).path)
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    (tmp_path / "other.c").write_text("int nothing;")
    paths.add(build(folder, compiler=command).path)
    assert len(paths) == 4


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Both get a whole file under the same name; nothing else stays behind."""
    command = compiler(tmp_path, COUNTS.format(log=tmp_path / "log"))
    found: list[Built] = []
    threads = [
        threading.Thread(target=lambda: found.append(build(tmp_path / "c", compiler=command)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.path for result in found}) == 1
    assert len(list((tmp_path / "c").iterdir())) == 2  # the library and its digest


def test_failures_are_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, one that does not run, one that fails, a folder that is a file."""
    version = 'if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n'
    fails = compiler(tmp_path, version + 'echo "fatal: no such flag" >&2; exit 1')
    result = build(tmp_path / "c", compiler=fails)
    assert result.path is None
    assert "fatal: no such flag" in str(result.reason)
    assert not any((tmp_path / "c").iterdir())
    gone = build(tmp_path / "c", compiler=str(tmp_path / "gone"))
    assert "does not run" in str(gone.reason)
    (tmp_path / "file").write_text("")
    good = compiler(tmp_path, COUNTS.format(log=tmp_path / "log"))
    blocked = build(tmp_path / "file", compiler=good)
    assert "can't be written" in str(blocked.reason)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(tmp_path / "c").reason == "CC=no-such-compiler is not found"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "no C compiler is found" in str(build(tmp_path / "c").reason)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is remembered of this machine's library, during the test and after it."""
    monkeypatch.setattr(building, "built", built_again := _uncached())
    monkeypatch.setattr(loading, "built", built_again)
    monkeypatch.setattr(loading, "loaded", _Uncached(loading.loaded.__wrapped__))
    return monkeypatch


class _Uncached:
    """A cached function without its memory."""

    def __init__(self, function: object) -> None:
        self._function = function

    def __call__(self) -> object:
        assert callable(self._function)
        return self._function()

    def cache_clear(self) -> None:
        """Nothing to forget."""


def _uncached() -> _Uncached:
    return _Uncached(building.built.__wrapped__)


def test_own_kernels_can_be_refused(fresh: pytest.MonkeyPatch) -> None:
    """PACELINE_NATIVE=0: the torch path, named."""
    fresh.setenv("PACELINE_NATIVE", "0")
    assert loading.native() is None
    assert loading.refusal(torch.bfloat16) == "PACELINE_NATIVE=0 refuses own kernels"


def test_a_machine_without_a_compiler_is_told(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that names the slower path and what to do."""
    fresh.setattr(building, "find_compiler", lambda: None)
    fresh.delenv("CC", raising=False)
    assert loading.native() is None
    assert "no C compiler is found" in str(loading.refusal(torch.bfloat16))
    assert "torch's, which are slower" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "empty", "no digest", "foreign digest"])
def test_a_damaged_library_is_made_anew(tmp_path: Path, damage: str) -> None:
    """Loading half a library ends the process, so it is never tried."""
    command = compiler(tmp_path, COUNTS.format(log=tmp_path / "log"))
    path = build(tmp_path / "c", compiler=command).path
    assert path is not None
    whole, runs = path.read_bytes(), len((tmp_path / "log").read_text().splitlines())
    if damage == "truncated":
        path.write_bytes(whole[:5])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no digest":
        path.with_suffix(".sha256").unlink()
    else:
        path.with_suffix(".sha256").write_bytes(b"\xff\xfe")
    assert build(tmp_path / "c", compiler=command).path == path
    assert path.read_bytes() == whole
    assert len((tmp_path / "log").read_text().splitlines()) == 2 * runs


def test_a_library_that_does_not_load_is_a_reason(
    tmp_path: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a compiler made for another system is refused, with the loader's words."""
    fresh.setenv("PACELINE_CACHE", str(tmp_path / "c"))
    fresh.setenv("CC", compiler(tmp_path, COUNTS.format(log=tmp_path / "log")))
    assert loading.native() is None
    assert "can't be loaded" in str(loading.refusal(torch.bfloat16))
    assert "can't be loaded" in caplog.text


@needs_compiler
def test_a_cache_that_can_not_be_written_is_no_obstacle(
    tmp_path: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A temporary folder serves the process, and the user hears what to do about it."""
    (tmp_path / "file").write_text("")
    fresh.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    fresh.setattr(building.tempfile, "tempdir", str(tmp_path))

    def made(compiler: list[str], flags: tuple[str, ...], to: Path) -> None:
        to.write_bytes(b"")

    fresh.setattr(building, "_compile", made)
    found = building.built()
    assert found.path is not None
    assert found.path.parent.parent == tmp_path
    assert found.path.parent.name.startswith("paceline-kernels-")
    assert "can't be written" in caplog.text
    assert "set PACELINE_CACHE" in caplog.text


FULL = """if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi
for last; do :; done
case "$last" in {cache}/*) echo "kein Speicherplatz" >&2; exit 1;; esac
echo not a library > "$last"
"""


@pytest.fixture
def full(tmp_path: Path, fresh: pytest.MonkeyPatch) -> Path:
    """A cache folder on a disk with no room for what the compiler writes, and another disk."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    fresh.setenv("PACELINE_CACHE", str(cache))
    fresh.setenv("CC", compiler(tmp_path, FULL.format(cache=cache)))
    fresh.setattr(building.tempfile, "tempdir", str(temporary))
    fresh.setattr(building, "_same_disk", lambda one, other: False)
    return temporary


def test_a_full_cache_disk_is_no_obstacle(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A compiler that runs out of space may succeed on another disk; the message says both."""
    found = building.built()
    assert found.path is not None
    assert found.path.parent.parent == full
    assert "fails: kein Speicherplatz" in caplog.text
    assert "Free space, or set PACELINE_CACHE" in caplog.text


def test_a_full_disk_for_everything_is_said_once(
    full: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the temporary folder is on the same disk, nothing is compiled twice or left there."""
    fresh.setattr(building, "_same_disk", lambda one, other: True)
    assert building.built().path is None
    assert "kein Speicherplatz; torch's, which are slower" in caplog.text
    fresh.setattr(building, "_same_disk", lambda one, other: False)
    fresh.setenv("CC", compiler(full.parent, COUNTS.split("\n", 1)[0] + "\nexit 1"))
    assert building.built().path is None, "a compiler that fails anywhere"
    fresh.setattr(building.tempfile, "tempdir", str(full / "gone"))
    assert building.built().path is None, "no temporary folder at all"
    assert not any(full.iterdir())


def test_an_account_without_a_home_has_kernels(
    full: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers run under accounts that nobody made; they compile for themselves."""

    def homeless() -> Path:
        msg = "no home"
        raise RuntimeError(msg)

    fresh.delenv("PACELINE_CACHE")
    fresh.setattr(Path, "home", homeless)
    found = building.built()
    assert found.path is not None
    assert found.path.parent.parent == full
    assert "there is no cache folder: no home" in caplog.text


def test_doctor_can_explain_every_op() -> None:
    """Each op has exactly one chosen implementation per dtype, and a reason for each refused one."""
    for dtype in (torch.bfloat16, torch.float64):
        for op in OPS:
            choices = explain(op, "cpu", dtype)
            assert sum(choice.chosen for choice in choices) == 1, op
            assert choices[0].chosen or choices[0].reason
    own = explain("rms_norm", "cpu", torch.float64)[0]
    assert own.reason is not None
    assert "float64" in own.reason
    assert explain("rms_norm", "cuda", torch.bfloat16)[0].reason == "runs on cpu only"


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
@pytest.mark.parametrize("tuning", ["-march=x86-64", "-march=x86-64-v3"])
def test_portable_code_computes_the_same(cache_dir: Path, tuning: str) -> None:
    """What processors without AVX-512 run, to float32 accuracy; groups: see test_cpu_groups."""
    from paceline.ops.cpu import attention, dense, fused
    from paceline.ops.reference import fused as reference
    from tests.tolerance import close

    result = build(cache_dir / "portable", tuning=(tuning,))
    assert result.path is not None, result.reason
    lib = loading.load(result.path)
    assert lib.fast == tuning.endswith("v3")
    assert not lib.pairs
    assert not lib.tiles
    assert lib.groups == ("AVX2" if tuning.endswith("v3") else None)
    gen = torch.Generator().manual_seed(0)
    for dtype in loading.DTYPES:
        weight, x = (torch.randn(n, 50, generator=gen).to(dtype) for n in (70, 9))
        held = dense.DenseWeight.pack(weight, lib)
        assert close(held.matmul(x), x.double() @ weight.double().T)
        assert torch.equal(held.matmul(x)[:1], held.matmul(x[:1]))
        assert torch.equal(held.rows(torch.tensor([69, 0, 33])), weight[[69, 0, 33]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "native", lambda: lib)
        patch.setattr(attention, "native", lambda: lib)
        for dtype in loading.DTYPES:
            x = torch.randn(5, 72, generator=gen).to(dtype)
            scale = torch.ones(72, dtype=dtype)
            exact = reference.rms_norm(x.double(), scale.double(), 1e-5)
            assert close(fused.rms_norm(x, scale, 1e-5), exact)
            assert close(fused.silu_mul(x), reference.silu_mul(x.double()))
            q, k, v = (torch.randn(n, 2, 32, generator=gen).to(dtype) for n in (3, 80, 80))
            caches = [c.transpose(0, 1).contiguous() for c in (k, v)]
            plan = attention.plan(
                num_rows=1,
                positions=torch.tensor([77, 78, 79]),
                prefix_lens=torch.tensor([77]),
                cu_q=torch.tensor([0, 3]),
                tail_lens=torch.tensor([3]),
                mask=None,
                pages=torch.arange(5, dtype=torch.int32)[None],
                page_size=16,
                q_heads=2,
                q_dtype=dtype,
                k_cache=caches[0],
            )
            found = attention.attend(plan, q, *caches, scale=0.2, window=None, causal=False)
            scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.2
            scores += torch.full((3, 80), -torch.inf).double().triu(78)
            want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
            assert close(found, want)


def test_the_refusal_names_the_dtype() -> None:
    """float64 is torch's on every machine."""
    assert "not float64" in str(refusal(torch.float64))
    assert (refusal(torch.bfloat16) is None) == (native() is not None)
