from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline import models
from paceline.models import atomic, cache, gguf_weights
from tests import tiny
from tests.dense import logits
from tests.tiny_gguf import write_tiny_gguf

TEXT = [11, 12, 13, 14, 15, 16]
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, not yet made."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    cache._digest.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tiny GGUF file."""
    return write_tiny_gguf(tmp_path / "m.gguf", tiny.write_tiny(tmp_path / "m"), Kind.Q4_1)


def load(path: Path, dtype: torch.dtype = torch.float32) -> models.LoadedModel:
    files = models.resolve(str(path))
    return models.load(files, device=CPU, dtype=dtype, weights="bf16")


def down(loaded: models.LoadedModel) -> torch.Tensor:
    """A matrix of the network, plain again if it was packed."""
    weight = loaded.net.layers[0].mlp.down.weight
    return weight if isinstance(weight, torch.Tensor) else weight.plain()


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def fail_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a conversion, whether to disk or in memory, fails the test."""
    monkeypatch.setattr(
        gguf_weights.GGUFTensors, "parts", lambda *_: pytest.fail("converted again")
    )


def test_a_second_start_converts_and_hashes_nothing(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted file is found by the remembered digest; the original's tensors stay unread."""
    first = load(file)
    assert len(kept(folder)) == 1
    assert "converted now" in first.notes[0]
    fail_conversion(monkeypatch)
    cache._digest.cache_clear()
    monkeypatch.setattr(cache.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    second = load(file)
    assert "converted before" in second.notes[0]
    assert torch.equal(logits(second.net, TEXT), logits(first.net, TEXT))


def test_another_file_of_the_same_name_size_and_place_is_not_confused(
    folder: Path, file: Path, tmp_path: Path
) -> None:
    """Entries are named by content: a file that changed under its name is converted anew."""
    before = logits(load(file).net, TEXT)
    size = file.stat().st_size
    write_tiny_gguf(file, tiny.write_tiny(tmp_path / "other", seed=1), Kind.Q4_1)
    assert file.stat().st_size == size
    assert not torch.equal(logits(load(file).net, TEXT), before)
    assert len(kept(folder)) == 2


def test_a_copy_elsewhere_is_the_same_entry(
    folder: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving a model does not convert it again."""
    load(file)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    fail_conversion(monkeypatch)
    load(copy)


def test_formats_without_codes_are_kept_by_dtype(folder: Path, tmp_path: Path) -> None:
    """What is rounded to the network's dtype is never served to a network of a wider one."""
    file = write_tiny_gguf(tmp_path / "q5.gguf", tiny.write_tiny(tmp_path / "m5"), Kind.Q5_0)
    wide = load(file, torch.float32)
    narrow = load(file, torch.bfloat16)
    again = load(file, torch.float32)
    assert len(kept(folder)) == 2
    assert torch.equal(logits(again.net, TEXT), logits(wide.net, TEXT))
    weight = down(wide)
    assert torch.equal(down(narrow), weight.bfloat16())
    assert not torch.equal(weight.bfloat16().float(), weight)


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "foreign", "overwritten", "foreign, with its sum"]
)
def test_a_damaged_entry_is_converted_again(
    folder: Path, file: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """A damaged cache costs a conversion, with a warning; it never stops a start or changes a weight."""
    expected = logits(load(file).net, TEXT)
    [entry] = kept(folder)
    content = entry.read_bytes()
    if damage.startswith("foreign"):
        foreign = tiny.write_tiny(folder.parent / "f") / "model.safetensors"
        entry.write_bytes(foreign.read_bytes())
        if damage != "foreign":
            cache.keep_sum(entry)
    elif damage == "overwritten":
        middle = len(content) // 2
        entry.write_bytes(content[:middle] + b"\xff" * 16 + content[middle + 16 :])
    else:
        entry.write_bytes(content[:-1] if damage == "truncated" else b"")
    assert torch.equal(logits(load(file).net, TEXT), expected)
    assert "converting again" in caplog.text
    assert "Download" not in caplog.text, "what was downloaded is whole"
    assert entry.read_bytes() == content
    caplog.clear()
    assert "converted before" in load(file).notes[0]
    assert not caplog.text


@pytest.mark.parametrize("text", [None, "", "00000000", "\xff"])
def test_an_entry_without_its_sum_is_converted_again(
    folder: Path, file: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    """What can't be checked, as of a version that kept no sums, is not used."""
    load(file)
    [entry] = kept(folder)
    [checksum] = folder.glob("*.crc32")
    if text is None:
        checksum.unlink()
    else:
        checksum.write_text(text, encoding="latin-1")
    assert "converted now" in load(file).notes[0]
    assert str(entry) in caplog.text
    assert "converted before" in load(file).notes[0]


def test_the_sum_is_the_crc_32_of_the_bytes(folder: Path) -> None:
    """Pieces add up, also where the file is not a whole number of them."""
    folder.mkdir()
    content = bytes(range(256)) * 5000
    (folder / "x.bin").write_bytes(content)
    cache.keep_sum(folder / "x.bin")
    assert (folder / "x.crc32").read_text() == f"{zlib.crc32(content):08x}"


def test_a_full_disk_leaves_nothing_and_converts_in_memory(
    folder: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No space: the model starts all the same, the user is warned, no partial file stays."""
    expected = logits(load(file).net, TEXT)
    for kind in ("*.safetensors", "*.crc32"):
        for path in folder.glob(kind):
            path.unlink()
    sync = os.fsync

    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", full)
    loaded = load(file)
    assert torch.equal(logits(loaded.net, TEXT), expected)
    assert "No space left on device" in loaded.notes[0]
    assert "set PACELINE_CACHE" in caplog.text
    assert [p.name for p in folder.iterdir()] == ["digests"]


def test_a_disk_that_fills_in_mid_file_leaves_nothing(tmp_path: Path) -> None:
    """A write that fails half-way removes its own temporary file and keeps the old content."""
    target = tmp_path / "x"
    target.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), atomic.replacing(target) as out:
        write(out)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


@pytest.mark.parametrize("kind", ["a file", "below a file", "read-only"])
def test_a_cache_folder_that_cannot_be_used_is_done_without(
    tmp_path: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """Missing and impossible, or read-only: converted in memory, with a warning that says how to help."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "good"))
    expected = logits(load(file).net, TEXT)
    place = tmp_path / "cache"
    if kind == "read-only":
        place.mkdir(mode=0o555)
        if os.geteuid() == 0:  # root may write anywhere: refuse what others would be refused
            opened = Path.open

            def refuse(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
                if mode == "xb":
                    raise PermissionError(errno.EACCES, "Permission denied", str(self))
                return opened(self, mode, *args, **options)

            monkeypatch.setattr(Path, "open", refuse)
    else:
        place.write_bytes(b"")
        place = place if kind == "a file" else place / "deeper"
    monkeypatch.setenv("PACELINE_CACHE", str(place))
    cache._digest.cache_clear()
    loaded = load(file)
    assert "converted in memory" in loaded.notes[0]
    assert "Set PACELINE_CACHE to a writable folder" in caplog.text
    assert "Free space" not in caplog.text, "no room would help here"
    assert torch.equal(logits(loaded.net, TEXT), expected)


def test_room_is_advised_where_it_helps() -> None:
    """Only a full disk, or a full quota, is helped by free space."""
    texts = {code: cache.remedy(OSError(code, "")) for code in (errno.ENOSPC, errno.EROFS)}
    assert texts[errno.ENOSPC] == "Free space, or set PACELINE_CACHE to a writable folder"
    assert texts[errno.EROFS] == "Set PACELINE_CACHE to a writable folder"


def test_an_account_without_a_home_is_done_without(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Service accounts have no home folder, and no cache unless one is named."""
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home folder")))
    cache._digest.cache_clear()
    assert "no home folder" in load(file).notes[0]
    assert "converting in memory" in caplog.text


CONVERT = """
import sys, time, torch
from pathlib import Path
from paceline import models
from paceline.models import gguf_weights

if sys.argv[2] == "slow":
    parts, calls = gguf_weights.GGUFTensors.parts, []
    def slow(self, name):
        calls.append(name)
        if len(calls) == 8:
            print("half", flush=True)
            time.sleep(60)
        return parts(self, name)
    gguf_weights.GGUFTensors.parts = slow
print("start", flush=True)
sys.stdin.readline()
files = models.resolve(sys.argv[1])
models.load(files, device=torch.device("cpu"), dtype=torch.float32, weights="bf16")
"""


def start(file: Path, speed: str) -> subprocess.Popen[str]:
    """A process that loads the file when it is sent a line."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "PACELINE_NATIVE": "0",  # or each would compile kernels for the test's own cache folder
    }
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(file), speed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


def test_a_killed_conversion_leaves_nothing_that_is_taken_as_good(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL half-way: the next start converts afresh, and later the remains are swept away."""
    process = start(file, "slow")
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "start\n"
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not kept(folder)
    [remains] = folder.glob(".*.partial")
    loaded = load(file)
    assert "converted now" in loaded.notes[0]
    monkeypatch.setenv("PACELINE_CACHE", str(folder.parent / "other"))
    assert torch.equal(logits(load(file).net, TEXT), logits(loaded.net, TEXT))
    assert remains.exists(), "it may belong to a live process"
    long_ago = time.time() - 7200
    os.utime(remains, (long_ago, long_ago))
    atomic.sweep(folder)
    assert not remains.exists()


def test_two_processes_converting_at_once_are_fine(folder: Path, file: Path) -> None:
    """Each writes a file of its own; whoever is last wins, and both finish."""
    pair = [start(file, "fast") for _ in range(2)]
    for process in pair:
        assert process.stdout.readline() == "start\n"
    for process in pair:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in pair:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert len(kept(folder)) == 1
    assert not list(folder.glob(".*.partial"))
    assert "converted before" in load(file).notes[0]


def test_digests_are_those_of_the_bytes(folder: Path, tmp_path: Path) -> None:
    """The remembered digest is the file's SHA-256, and a damaged memory is not believed."""
    import hashlib

    path = tmp_path / "f"
    path.write_bytes(b"abc")
    expected = hashlib.sha256(b"abc").hexdigest()
    assert cache.digest(path) == expected
    [memo] = (folder / "digests").iterdir()
    for text in ("", "nonsense", "\xff"):
        memo.write_text(text, encoding="latin-1")
        cache._digest.cache_clear()
        assert cache.digest(path) == expected
    assert memo.read_text() == expected
