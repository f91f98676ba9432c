"""Compiles the C kernels with the system's compiler, once per machine and source, into the cache.

A library's name is a hash of the sources, the compiler's version, the flags and the processor's
features, so it can't go stale or meet a processor that it was not made for. It is written under
another name and renamed, so that a reader never sees half a file and two processes may compile at
once. Its digest lies beside it: loading a damaged library would end the process. Where the cache
can't be written, or its disk is full, a temporary folder serves this process alone.

Environment: `PACELINE_CACHE` moves the cache folder; `PACELINE_NATIVE=0` refuses own kernels (to
look for a fault); `CC` names the compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.core import environment

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
TIMEOUT_S = 600
# No fusing of a * b + c behind our back: bits must not depend on where a function was inlined.
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
_SCRATCH = ".compiling-"  # what begins a folder in which a library is made
_STALE_SECONDS = 2.0 * TIMEOUT_S  # no step of a live compilation is silent for so long
_TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A compiled library, or the reason why there is none."""

    path: Path | None
    reason: str | None  # a clause; None if there is a library
    compiler: str = ""  # its first line of --version
    unwritable: bool = False  # the reason is the folder, not the compiler
    flags: tuple[str, ...] = ()


def find_compiler() -> str | None:
    """Return the command of a C compiler: $CC, or the first of cc, gcc and clang that is found."""
    chosen = environment.c_compiler()
    if chosen:
        words = shlex.split(chosen)
        return chosen if words and shutil.which(words[0]) else None
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def cpu_features() -> str:
    """Return a text that differs between processors with different instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    seen = {line for line in text.splitlines() if line.split("\t")[0].strip(" :") in keys}
    return f"{platform.machine()}\n" + "\n".join(sorted(seen))


def build(
    folder: Path, *, compiler: str | None = None, tuning: tuple[str, ...] | None = None
) -> Built:
    """Return the library for this machine from `folder`, compiling it if it is not there yet.

    Args:
        folder: where libraries are kept; made if missing.
        compiler: command; default: `find_compiler()`.
        tuning: processor flags instead of this machine's own (for tests of portable code).
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        wanted = environment.c_compiler()
        return Built(path=None, reason=f"CC={wanted} is not found" if wanted else _NO_COMPILER)
    try:
        version = _run([*shlex.split(compiler), "--version"]).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return Built(path=None, reason=f"the C compiler {compiler} does not run: {_text(error)}")
    problem = ""
    for tune in _TUNINGS if tuning is None else (tuning,):
        flags = (*_FLAGS, *tune)
        path = folder / f"kernels-{_key(version, flags)}.so"
        if _sound(path):
            return Built(path=path, reason=None, compiler=version, flags=flags)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _compile(shlex.split(compiler), flags, path)
        except subprocess.SubprocessError as error:
            problem = f"{compiler} fails: {_text(error)}"
            continue
        except OSError as error:
            reason = f"{folder} can't be written: {error}"
            return Built(path=None, reason=reason, compiler=version, unwritable=True)
        return Built(path=path, reason=None, compiler=version, flags=flags)
    return Built(path=None, reason=problem, compiler=version)


_NO_COMPILER = "no C compiler is found (cc, gcc or clang; set CC to name one)"


@functools.cache
def built() -> Built:
    """Return this machine's library; compiled at the first call of the first process."""
    if not environment.allows_native():
        return Built(path=None, reason="PACELINE_NATIVE=0 refuses own kernels")
    try:
        folder = environment.cache_path()
    except OSError as error:  # an account without a home folder
        found = _elsewhere(None, Built(path=None, reason=f"there is no cache folder: {error}"))
    else:
        found = build(folder)
        if found.path is None and found.compiler:
            found = _elsewhere(folder, found)
    if found.path is None:
        logger.warning(
            "own CPU kernels are not used: %s; torch's, which are slower, are", found.reason
        )
    return found


def _elsewhere(folder: Path | None, failed: Built) -> Built:
    """Compile in a temporary folder what could not be compiled in the cache, if that may help.

    A compiler whose output does not fit the disk fails like one that does not know a flag, and says
    so in any language. So on another disk it is tried again, and the outcome tells.

    Args:
        folder: the cache; None: there is none.
        failed: the outcome there.
    """
    try:
        temporary = Path(tempfile.mkdtemp(prefix="paceline-kernels-"))
    except OSError as error:  # a full disk holds no folder either
        logger.debug("there is no temporary folder: %s", error)
        return failed
    if folder is not None and not failed.unwritable and _same_disk(folder, temporary):
        temporary.rmdir()
        return failed
    found = build(temporary)
    if found.path is None:
        shutil.rmtree(temporary, ignore_errors=True)
        return found if folder is None else failed
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    logger.warning(
        "the CPU kernels can't be kept in the cache folder (%s); they were compiled in %s for this "
        "process alone, as at every start until that is mended. Free space, or set PACELINE_CACHE to "
        "a writable folder on another disk",
        failed.reason,
        temporary,
    )
    return found


def _same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


def _key(version: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join((version, *flags, cpu_features())).encode())
    return digest.hexdigest()[:24]


def _sound(path: Path) -> bool:
    """Whether the library is there, and is what was written."""
    try:
        content, digest = path.read_bytes(), path.with_suffix(".sha256").read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return hashlib.sha256(content).hexdigest() == digest


def _compile(compiler: list[str], flags: tuple[str, ...], to: Path) -> None:
    """Compile every source, in parallel, link, and rename into place."""
    logger.info("compiling the CPU kernels, once on this machine, to %s", to)
    _sweep(to.parent)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=_SCRATCH) as scratch:
        sources = sorted(SOURCES.glob("*.c"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]

        def one(pair: tuple[Path, Path]) -> None:
            _run([*compiler, *flags, "-c", str(pair[0]), "-o", str(pair[1])])

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as workers:
            list(workers.map(one, zip(sources, objects, strict=True)))
        library = Path(scratch) / to.name
        _run([*compiler, *flags, "-shared", *map(str, objects), "-lm", "-o", str(library)])
        digest = library.with_suffix(".sha256")
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        digest.replace(to.with_suffix(".sha256"))
        library.replace(to)


def _sweep(folder: Path) -> None:
    """Remove what killed compilations left; a folder's time is that of the newest file in it."""
    for remains in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - remains.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(remains, ignore_errors=True)


def _run(command: list[str]) -> str:
    done = subprocess.run(  # noqa: S603 (the user's own compiler)
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return done.stdout


def _text(error: Exception) -> str:
    """The first error that a failed compiler names, else its last line, or the exception's words."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        named = [line for line in lines if "error:" in line]
        return [*named, *reversed(lines)][0] if lines else f"exit status {error.returncode}"
    return str(error)
