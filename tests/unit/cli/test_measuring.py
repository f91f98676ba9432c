from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from paceline.bench.run import Task
from paceline.cli.workbench import check_lengths, publish
from paceline.core import device
from paceline.core.errors import RequestError
from paceline.core.request import Request
from paceline.ops.cpu import native
from tests import tiny

ROWS = [
    {"question_id": 1, "category": "qa", "turns": ["the end"]},
    {"question_id": 2, "category": "qa", "turns": ["of it"]},
    {"question_id": 3, "category": "rag", "turns": ["and on"]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(path)


def different(request: Request, seed: int) -> list[int]:
    return [10, 11, 12] if request.params.num_speculative_tokens == 0 else [10, 11, 13]


def test_bench_prints_its_record_last(run, prompts: str, tmp_path: Path) -> None:
    """One JSON record is the last line of stdout; the table is on stderr; a file can be had too."""
    out = tmp_path / "records" / "one.json"
    ran = run("bench", prompts, "--max-tokens", "6", "--repeats", "2", "--out", str(out))
    assert ran.code == 0, ran.err
    record = json.loads(ran.out.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    (result,) = record["results"]
    assert [g["group"] for g in result["groups"]] == ["qa", "rag", "all"]
    assert record["settings"]["repeats"] == 2
    assert record["config"]["device"] == "cpu"
    assert "accept length" in ran.err
    assert "\x1b" not in ran.err
    assert ran.engines[0].closed_by


@pytest.mark.parametrize(
    "words", [("bench", "PROMPTS"), ("check", "lossless", "PROMPTS", "--temperature", "0")]
)
def test_a_terminal_is_spared_the_record(
    run, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A line of thousands of characters hides the table; --json asks for it, --out keeps it."""
    out = tmp_path / "one.json"
    words = tuple(prompts if word == "PROMPTS" else word for word in words)
    words = (*words, "--max-tokens", "4", "--out", str(out))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    ran = run(*words)
    assert (ran.code, ran.out) == (0, ""), ran.err
    record = json.loads(out.read_text())
    assert json.loads(run(*words, "--json").out.splitlines()[-1])["schema"] == record["schema"]


def test_publish_leaves_the_record_to_pipes_and_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Piped output is as it was, with and without --json."""
    publish({"a": 1}, None)
    publish({"a": 1}, None, as_json=True)
    assert capsys.readouterr().out == '{"a": 1}\n' * 2
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    publish({"a": 1}, None)
    assert capsys.readouterr().out == ""


def test_bench_compares_drafters(run, prompts: str) -> None:
    """--spec may be given several times; each has an engine, a baseline and columns of its own."""
    ran = run(
        *("bench", prompts, "--limit", "1", "--max-tokens", "6"),
        *("--spec", "none", "--spec", "ngram", "--spec", "suffix:path"),
    )
    assert ran.code == 0, ran.err
    record = json.loads(ran.out.splitlines()[-1])
    assert [r["spec"] for r in record["results"]] == ["none", "ngram", "suffix:path"]
    assert record["results"][2]["draft"]["suffix_shape"] == "path"
    assert record["workload"]["num_prompts"] == 2
    assert len(ran.engines) == 3
    assert any("noise" in warning for warning in record["warnings"])


def test_bench_gives_a_folder_to_the_networks_that_are_compared(run, prompts: str) -> None:
    """Who else is compared with them has no use for it; a folder for nobody is not taken away."""
    words = ("bench", prompts, "--limit", "1", "--max-tokens", "2", "--spec-model", "folder")
    ran = run(*words, "--spec", "none", "--spec", "suffix", "--spec", "dflash")
    assert [c.draft.model for c in ran.configs] == [None, None, "folder"]
    ran = run(*words, "--spec", "none", "--spec", "suffix")
    assert {c.draft.model for c in ran.configs} == {"folder"}, "so that the engine refuses it"


def test_a_prompt_within_the_model_s_limit_needs_a_longer_window() -> None:
    """Where the window was chosen, it can be chosen longer; the limit is named."""
    tasks = [Task(key="a", group="g", prompt_ids=[5] * 100)]
    with pytest.raises(RequestError, match=r"raise --max-len \(the model's limit is 200\)"):
        check_lengths(tasks, 80, 200)
    check_lengths(tasks, 101, 200)
    with pytest.raises(RequestError, match="no longer one than 80: leave them out") as caught:
        check_lengths(tasks, 80, 80)
    assert "raise" not in str(caught.value)


def test_bench_says_what_inflates_its_figures(run, prompts: str) -> None:
    """Text after the end of an answer repeats itself; a figure made so must say it."""
    ran = run("bench", prompts, "--ignore-eos", "--max-tokens", "6")
    assert "inflates accept length" in ran.err
    assert json.loads(ran.out)["warnings"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "no prompts: name one or more JSONL files"),
        (["missing.jsonl"], "cannot read prompts from missing.jsonl"),
        (["PROMPTS", "--category", "code"], "categories here: qa, rag"),
        (["PROMPTS", "--repeats", "0"], "--repeats 0 must be >= 1"),
        (
            ["PROMPTS", "--limit", "0", "--max-tokens", "0"],
            "--max-tokens 0 must be >= 1; --limit 0",
        ),
        (["PROMPTS", "--plot", "x.gif2"], "possible are .png"),
        (["PROMPTS", "--temperature", "nan"], "temperature nan not in"),
        (["PROMPTS", "--spec", "ngram", "-sc", '{"method": "none"}'], "given both"),
    ],
)
def test_bench_refuses_mistakes(run, prompts: str, arguments: list[str], message: str) -> None:
    """Mistakes are told before anything long begins."""
    ran = run("bench", *(prompts if a == "PROMPTS" else a for a in arguments))
    assert ran.code == 2
    assert message in ran.err
    assert ran.out == ""


def test_bench_refuses_prompts_that_leave_no_room(run, prompts: str) -> None:
    """Too long prompts are named before the run, with their lengths."""
    ran = run("bench", prompts, max_len=20)
    assert ran.code == 2
    assert "question/1 (" in ran.err
    assert "the model can have no longer one than 20" in " ".join(ran.err.split())


def test_lossless_holds(run, prompts: str) -> None:
    """Equal at both temperatures: exit code 0, a line each, and a record."""
    ran = run("check", "lossless", prompts, "--max-tokens", "6", "--spec", "ngram")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out.splitlines()[-1])
    assert record["equal"] is True
    assert [r["temperature"] for r in record["results"]] == [0.0, 1.0]
    assert "ngram, temperature 1: 3 of 3 answers equal" in ran.err


def test_lossless_shows_where_it_does_not_hold(run, prompts: str, tmp_path: Path) -> None:
    """Exit code 1, the first difference with both tokens and the logit gap, and a record."""
    out = tmp_path / "record.json"
    ran = run(
        *("check", "lossless", prompts, "--max-tokens", "6", "--temperature", "0"),
        *("--out", str(out)),
        script=different,
    )
    assert ran.code == 1
    assert "prompt question/1, output token 2: 12 'j' autoregressively, 13 'k' with" in ran.err
    assert "logit gap of the two best 0.25" in ran.err
    record = json.loads(out.read_text())
    assert record["equal"] is False
    assert record["results"][0]["differences"][0]["logit_gap"] == 0.25


def test_lossless_has_prompts_of_its_own(run) -> None:
    """Without a file the built-in prompts are checked."""
    ran = run("check", "lossless", "--limit", "1", "--max-tokens", "4", max_len=2000)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["workload"]["groups"] == {"built-in": 1}
    assert run("check", "lossless", "--category", "qa").code == 2
    assert run("check", "lossless", "--max-tokens", "0").code == 2


def test_demo_compares_both_ways(run) -> None:
    """Text twice, then the table and whether the outputs are equal; the prompt cache is off."""
    ran = run("demo", "the end", "--max-tokens", "8")
    assert ran.code == 0, ran.err
    assert ran.out.count("the answer") == 2
    assert "accept length" in ran.out
    assert "The outputs are equal: all" in ran.out
    assert "Next: paceline chat" in ran.err
    assert "\x1b" not in ran.out
    assert ran.configs[0].cache.prefix_cache is False
    plain = [r.params.num_speculative_tokens == 0 for r in ran.engines[0].added]
    assert plain == [False, True, False, True]  # warm-up, then the answers


def test_demo_says_what_its_own_prompt_suits(run) -> None:
    """Asking for a copy flatters drafters that copy, and the demo says so; a trained one gets a task."""
    ran = run("demo", max_len=2000)
    assert "asks for a copy of a text" in " ".join(ran.out.split())
    ran = run("demo", "--spec", "dflash", "--spec-model", "folder", max_len=2000)
    assert "copy" not in ran.out
    assert "Fibonacci" in ran.out


def test_demo_tells_where_outputs_differ(run) -> None:
    """Where the machine's rounding depends on the number of rows, the gap is shown."""
    ran = run("demo", "the", "--max-tokens", "6", script=different)
    assert ran.code == 0
    assert "differ from output token 2 on" in ran.out
    assert "0.25" in ran.out


def test_doctor_tells_everything(run) -> None:
    """Machine, versions, memory, model, drafters, backends and operators, with reasons."""
    ran = run("doctor", "--model", "no/such/model")
    assert ran.code == 0, ran.err
    for word in ("versions", "torch", "cores", "free memory", "drafters", "suffix", "reference"):
        assert word in ran.out
    assert "unknown model 'no/such/model'" in ran.out
    found = json.loads(run("doctor", "--json").out)
    assert set(found["ops"])
    assert [n for n, reason in found["attention"].items() if reason is None]
    assert all(any(line["chosen"] for line in lines) for lines in found["ops"].values())
    assert found["model"]["name"] == "default"


def test_doctor_names_the_slower_way_of_an_old_processor(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX512-BF16, or on a Mac: which number format is used instead, and what it costs."""
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(native, "refusal", lambda dtype: "no compiler")
    choice = json.loads(run("doctor", "--json", "--device", "cpu").out)["choice"]
    assert choice["dtype"] == "float32"
    assert re.search("AVX512-BF16.*float32 is used, .* twice the bytes", choice["fast_bf16"])
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    choice = json.loads(run("doctor", "--json", "--device", "cpu").out)["choice"]
    assert (choice["dtype"], choice["fast_bf16"]) == ("bfloat16", True)


def test_doctor_tells_what_an_old_gpu_lacks(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU before 8.0 serves, with PyTorch's operators and in float32; every refusal says why."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr("paceline.bench.machine.machine", lambda _: {"gpu": "an old one"})
    ran = run("doctor", "--json", "--device", "cuda")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["choice"]["dtype"] == "float32"
    assert "7.5" in found["choice"]["fast_bf16"]
    assert "8.0" in found["attention"]["triton"]
    assert found["attention"]["reference"] is None
    own = [line for lines in found["ops"].values() for line in lines if line["name"] == "triton"]
    assert len(own) > 10
    assert all("8.0" in line["reason"] and "7.5" in line["reason"] for line in own)


@pytest.mark.parametrize("head_dim, refused", [(64, False), (80, True)])
def test_doctor_asks_for_the_model_s_own_heads(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int, *, refused: bool
) -> None:
    """Kernels for heads of other sizes are refused, what serves instead is there; so in the invariant mode."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("paceline.bench.machine.machine", lambda _: {"gpu": "a new one"})
    folder = tiny.write_tiny(tmp_path / "model", "llama", head_dim=head_dim)
    words = ("doctor", "--json", "--device", "cuda", "--model", str(folder))
    found = json.loads(run(*words).out)["attention"]
    assert ("not of 80" in (found["triton"] or "")) == refused
    assert found["sdpa"] is None
    left = json.loads(run(*words, "--batch-invariant").out)["attention"]
    assert ("not of 80" in (left["triton-invariant"] or "")) == refused
    assert all(left[name] is not None for name in left if name != "triton-invariant"), (
        "others are none for the mode"
    )


def test_doctor_reports_an_unusable_cache_folder(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache folder that can't be made is a finding, not a failure."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "below"))
    ran = run("doctor", "--json")
    assert ran.code == 0, ran.err
    cache = json.loads(ran.out)["cache"]
    assert cache["usable"] is False
    assert cache["folder"] == str(tmp_path / "file" / "below")
    assert cache["reason"] == "Not a directory"
    assert cache["remedy"] == "Set PACELINE_CACHE to a writable folder"
    shown = run("doctor").out
    assert all(str(value) in shown for value in (cache["folder"], cache["reason"], cache["remedy"]))


def test_doctor_says_what_multiplies_packed_matrices(run) -> None:
    """Of `linear` alone one would think that own kernels are off."""
    assert (
        "others go to what pack_dense or pack_groups used" in run("doctor", "--device", "cpu").out
    )


def test_doctor_refuses_what_this_machine_lacks(run) -> None:
    """Asking for a device that is not there is answered with what is."""
    ran = run("doctor", "--device", "cuda:99")
    assert ran.code == 2
    assert "cuda:99" in ran.err
