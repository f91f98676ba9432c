from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline.api.tokenizer import Tokenizer
from paceline.bench import widen_files
from paceline.cli import main
from paceline.models import cache
from paceline.models.checkpoint import INDEX, Checkpoint
from tests import tiny
from tests.dense import logits, target_of
from tests.tiny_drafters import write_dflash
from tests.tiny_gguf import write_tiny_gguf
from tests.widened import SIZES, facts, widen


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target."""
    return tiny.write_tiny(tmp_path_factory.mktemp("small") / "llama", "llama", seed=2)


def words(source: Path, out: Path, *more: str) -> list[str]:
    sizes = [w for k, v in SIZES.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    return ["widen", str(out), "--model", str(source), "--drafter", "none", *sizes, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_folder_that_other_programs_read(small: Path, tmp_path: Path) -> None:
    """Configuration, weights, tokenizer, template and generation settings; the tokens are the same."""
    out = widen(small, tmp_path / "deep" / "wide")
    names = {path.name for path in (out / "target").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    old, new = Tokenizer.from_files(small), Tokenizer.from_files(out / "target")
    chat = [{"role": "user", "content": "the thing and the other"}]
    assert new.encode_chat(chat) == old.encode_chat(chat)
    assert new.eos_token_ids == old.eos_token_ids
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    theirs = transformers.AutoTokenizer.from_pretrained(out / "target")
    assert theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == (
        old.encode_chat(chat)
    )
    assert transformers.GenerationConfig.from_pretrained(out / "target").eos_token_id == [tiny.EOS]


def test_a_gguf_file_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file says of the tokenizer and of ends of text is written out."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    source = write_tiny_gguf(
        tmp_path / "small.gguf",
        tiny.write_tiny(tmp_path / "plain", tie_word_embeddings=True),
        Kind.Q4_1,
    )
    out = widen(source, tmp_path / "wide")
    old, new = Tokenizer.from_files(source), Tokenizer.from_files(out / "target")
    text = "the thing, and <|im_end|> other Things"
    assert new.encode(text) == old.encode(text)
    assert new.chat_templates == old.chat_templates
    assert new.eos_token_ids == old.eos_token_ids
    assert facts(out)["sha256"] == cache.digest(source)
    small, wide = (target_of(folder)[0] for folder in (source, out / "target"))
    ids = list(range(3, 40))
    torch.testing.assert_close(logits(wide, ids), logits(small, ids), rtol=0, atol=1e-9)


def test_shards_come_with_their_index(small: Path, tmp_path: Path) -> None:
    """No file is larger than asked, but for one with a single tensor, and all tensors are found."""
    out = widen(small, tmp_path / "wide", **{"shard-gb": 1e-3})
    target = out / "target"
    index = json.loads((target / INDEX).read_text())
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == set(Checkpoint(target).shapes)
    sizes = {file.name: len(Checkpoint(file).shapes) for file in files}
    assert all(file.stat().st_size < 1_000_000 + 10_000 or sizes[file.name] == 1 for file in files)
    assert index["metadata"]["total_size"] == facts(out)["target"]["bytes"]
    whole = Checkpoint(widen(small, tmp_path / "whole") / "target")
    found = Checkpoint(target)
    assert all(torch.equal(found.read(name), whole.read(name)) for name in whole.shapes)


def test_the_same_seed_writes_the_same_bytes(small: Path, tmp_path: Path) -> None:
    """Records name a widening by its seed; another seed changes only what sees zeros."""
    drafter = write_dflash(tmp_path / "drafter", small)
    first = widen(small, tmp_path / "a", drafter)
    again = widen(small, tmp_path / "b", drafter)
    assert contents(first) == contents(again)
    silent = [widen(small, tmp_path / str(s), hidden_size=240, copies=2, seed=s) for s in (0, 1)]
    one, two = (Checkpoint(out / "target") for out in silent)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.read(name)[:, :128], two.read(name)[:, :128])
    assert not torch.equal(one.read(name)[:, 128:], two.read(name)[:, 128:])


def test_a_dry_run_says_all_and_writes_nothing(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record is that of the real run: parameters, bytes and zeros are those of the files."""
    assert main(words(small, tmp_path / "out", "--dry-run")) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []
    out = widen(small, tmp_path / "out", dtype="bfloat16")
    assert facts(out) == said
    written = Checkpoint(out / "target")
    tensors = {name: written.read(name) for name in written.shapes}
    assert sum(t.numel() for t in tensors.values()) == said["target"]["parameters"]
    read = [t for n, t in tensors.items() if n != "model.embed_tokens.weight"]
    assert sum(t.nbytes for t in read) == said["target"]["read_bytes_per_step"]
    share = sum(int(t.eq(0).sum()) for t in read) / sum(t.numel() for t in read)
    assert share == pytest.approx(said["target"]["zeros_share_of_read"], abs=1e-4)


@pytest.mark.parametrize("filled", ["folder", "file"])
def test_nothing_is_written_over(
    small: Path, tmp_path: Path, filled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that holds something is refused, with --dry-run too."""
    out = tmp_path / "out"
    if filled == "folder":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    else:
        out.write_text("mine")
    assert main(words(small, out, "--dry-run")) == 2
    assert "empty or not there yet. Name another" in capsys.readouterr().err
    assert out.is_file() or (out / "mine.txt").read_text() == "mine"


def test_an_empty_folder_is_taken(small: Path, tmp_path: Path) -> None:
    """Somebody may have made it, for its place on a disk."""
    (tmp_path / "out").mkdir()
    assert (widen(small, tmp_path / "out") / "target" / "config.json").is_file()


def test_a_full_disk_is_seen_before(
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Needed and free space are said, and nothing is left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, 250_000_000))
    assert main(words(small, tmp_path / "out")) == 2
    err = capsys.readouterr().err
    assert "0.27 GB of room" in err
    assert "0.25 GB that are free" in err
    assert "Free some" in err
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up meanwhile, say: no folder, and none beside it."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(widen_files, "write_json", full)
    assert main(words(small, tmp_path / "out")) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing_half_written(small: Path, tmp_path: Path) -> None:
    """The folder is not there after a kill; the next call removes what is left, and is whole."""
    code = (
        "import os, sys, signal; from paceline.models import checkpoint; real = checkpoint.write\n"
        "def write(path, specs, tensors, *rest):\n"
        "    def some():\n"
        "        for i, t in enumerate(tensors):\n"
        "            if i == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "            yield t\n"
        "    real(path, specs, some(), *rest)\n"
        "checkpoint.write = write\n"
        "from paceline.cli import main; main(sys.argv[1:])"
    )
    argv = words(small, tmp_path / "out", "--dtype", "float64")
    ran = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, check=False)
    assert ran.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.widening"
    assert main(argv) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert contents(tmp_path / "out") == contents(widen(small, tmp_path / "clean"))


def test_two_writers_do_not_mix(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused, and does not touch what the first has written."""
    fresh = tmp_path / ".out.widening"
    fresh.mkdir()
    (fresh / "half").write_text("x")
    descriptor = os.open(fresh, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert main(words(small, tmp_path / "out")) == 2
    finally:
        os.close(descriptor)
    assert "another process is writing" in capsys.readouterr().err
    assert (fresh / "half").exists()


@pytest.mark.parametrize(
    "more,message",
    [
        (["--hidden-size", "10"], "hidden size is 10, and the model's own is 64"),
        (["--drafter", "nowhere"], "no drafter folder"),
        (["--shard-gb", "0"], "--shard-gb 0.0 is no size"),
        (["--like", "gpt-5"], "qwen3-8b"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    small: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one message, before anything is read or written."""
    argv = ["widen", str(tmp_path / "out"), "--model", str(small), *more]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_drafters_of_one_name_are_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their widened folders would be one."""
    folders = [write_dflash(tmp_path / where / "same", small) for where in ("a", "b")]
    flags = [w for folder in folders for w in ("--drafter", str(folder))]
    assert main(["widen", str(tmp_path / "out"), "--model", str(small), *flags]) == 2
    assert "same name" in capsys.readouterr().err


def test_an_unsupported_architecture_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can be widened is what can be served."""
    source = tiny.write_tiny(tmp_path / "odd", architectures=["GPT2LMHeadModel"])
    assert main(words(source, tmp_path / "out")) == 2
    err = capsys.readouterr().err
    assert "'GPT2LMHeadModel'" in err
    assert "LlamaForCausalLM" in err
