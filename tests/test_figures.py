"""Figures in the README and the documentation are those of the records that they point to.

A record that is made anew fails here until the text says what it says. A figure without a record does
not belong there.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.models.cache import folder_digest
from tests.records import RESULTS, ROOT, text


@pytest.fixture(scope="module")
def core() -> dict[str, Any]:
    """What `make bench-cpu` wrote."""
    return json.loads((RESULTS / "cpu-core.json").read_text())


@pytest.fixture(scope="module")
def ops() -> dict[str, Any]:
    """What `benchmarks/cpu_ops.py` wrote."""
    return json.loads((RESULTS / "cpu-ops.json").read_text())


ENGINES = {
    "paceline_4bit": r"Paceline, 4-bit [^|]*",
    "paceline_bf16": "Paceline, bf16",
    "llama_cpp_q4_1": r"llama\.cpp, [^|]*",
    "transformers_bf16": "transformers, bf16",
    "transformers_float32": "transformers, float32",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_speeds_are_those_measured(core: dict[str, Any], engine: str) -> None:
    """The table of engines, each with the median of its own runs, on two machines."""
    earlier = json.loads((RESULTS / "cpu-core-epyc.json").read_text())
    cells = [
        f"{record['peers'][engine]['tokens_per_second']:.1f}" if engine in record["peers"] else "—"
        for record in (core, earlier)
    ]
    row = rf"\| {ENGINES[engine]} \| {cells[0]} \| {cells[1]} \|"
    assert re.search(row, text("README.md"))


def test_what_the_readme_says_of_the_record_is_in_it(core: dict[str, Any]) -> None:
    """The gain on copied text, and each bar that was missed, by how much."""
    rows = {row["name"]: row for row in core["rows"]}
    copy = rows["suffix_copy"]
    says = text("README.md")
    assert f"is {copy['value']:.1f} times as fast as Paceline's own plain decoding" in says
    assert f"(accept length {copy['baseline']['accept_length']:.1f}, all outputs equal)" in says
    assert copy["baseline"]["outputs_differ"] == 0
    assert rows.keys() == PHRASES.keys()
    for name, phrase in PHRASES.items():
        row = rows[name]
        assert phrase.format(row["value"]) in says, name
        assert (f"{phrase.format(row['value'])} (bar {row['bar']:g})" in says) != row["ok"], name


def test_the_readme_names_the_machine_of_the_record(core: dict[str, Any]) -> None:
    """Who made it, and what its bfloat16 is multiplied with."""
    says, machine = text("README.md"), core["machine"]
    maker = re.match(r"\w+", machine["cpu"])
    assert maker is not None
    kind = "AMX" if "amx_bf16" in machine["instructions"] else "AVX512-BF16"
    assert f"{machine['cores']} cores of an {maker[0]}" in says.replace("Two", "2").replace(
        "two", "2"
    )
    assert f"with {kind}" in says


# Rows of cpu-core.json, and how the README says each. A missed bar stands behind its figure.
PHRASES = {
    "ar_bf16": "bf16 decodes {:.1f} times as fast as transformers in bf16",
    "ar_4bit": "and 4-bit {:.1f} times",
    "batch8": "eight sequences give {:.1f} times the throughput of one",
    "verify8": "verifying eight nodes costs {:.2f} times one",
    "host_share": "the host's share of a step is {:.3f}",
    "draft_step": "a DFlash draft step costs {:.2f} of a plain step",
    "suffix_copy": "is {:.1f} times as fast as Paceline's own plain decoding",
    "suffix_specbench_t0": "it is {:.2f} times at temperature 0",
    "suffix_specbench_t1": "temperature 0 and {:.2f} at temperature 1",
    "prefix_hit": "a second request with the same 1,000 tokens computes {:.0f} of them",
    "peak_memory": "memory peaks at {:.2f} GB with eight sequences of 2,048 tokens",
    "second_start": "a second start takes {:.1f} s to the first text",
}
ERRORS = {"own": "4-bit, own", "torch": "4-bit, torch", "bf16": "bf16, own"}


def test_rounding_is_that_measured(ops: dict[str, Any]) -> None:
    """What packed weights cost, in both places that say it."""
    found = {name: 100 * ops["relative_error"][f"{e} [576, 1536]"] for name, e in ERRORS.items()}
    readme, cpu = text("README.md"), text("docs/cpu.md")
    for phrase in (
        f"{found['own']:.2f} % in our kernel",
        f"{found['torch']:.2f} % in PyTorch's 4-bit product",
        f"{found['bf16']:.2f} % for bfloat16 activations alone",
    ):
        assert phrase in readme
    for phrase in (
        f"{found['bf16']:.2f} %: the rounding of the result",
        f"{found['own']:.2f} %: the rounding of activations",
        f"{found['torch']:.2f} %: scales rounded to bfloat16",
    ):
        assert phrase in cpu


def test_products_take_what_the_page_says(ops: dict[str, Any]) -> None:
    """The times that the CPU kernels are argued for with."""
    times = ops["products"]["milliseconds_by_rows"]

    def ms(rows: int, name: str) -> float:
        return float(times[str(rows)][name]["median"])

    bf16 = ("bf16, torch linear", "bf16, oneDNN prepacked", "bf16, own")
    one, eight = ([f"{ms(n, name):.1f}" for name in bf16] for n in (1, 8))
    says = text("docs/cpu.md")
    assert (
        f"PyTorch's `linear` {one[0]} ms, oneDNN with prepacked weights {one[1]} ms, ours {one[2]} ms; "
        f"eight rows {eight[0]}, {eight[1]} and {eight[2]} ms"
    ) in says
    torch4, own4 = "int4 g32, torch", "4-bit, head 8-bit, own"
    assert f"eight rows cost {ms(8, torch4) / ms(1, torch4):.1f} times one" in says
    assert f"Ours, {ms(8, own4) / ms(1, own4):.1f} times" in says
    assert f"one row takes it {ms(1, own4):.1f} ms" in says


def test_the_weight_mode_that_is_chosen_is_the_fastest(
    core: dict[str, Any], ops: dict[str, Any]
) -> None:
    """`--weights auto` keeps a file's groups because that is what measured fastest."""
    assert core["peers"]["paceline_4bit"]["tokens_per_second"] == max(
        engine["tokens_per_second"] for engine in core["peers"].values()
    )
    for rows in ("1", "8"):
        times = {n: t["median"] for n, t in ops["products"]["milliseconds_by_rows"][rows].items()}
        assert min(times, key=lambda name: times[name]) == "4-bit, head 8-bit, own"


def test_the_tables_of_acceptance_are_those_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/acceptance.md, as `python benchmarks/accept.py table` writes it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = importlib.import_module("accept_tables")
    page = (ROOT / "docs" / "acceptance.md").read_text(encoding="utf-8")
    record = json.loads((RESULTS / "accept-smollm2.json").read_text())
    assert f"{made.BEGIN}\n\n{made.tables(record)}\n\n{made.END}" in page
    nats = record["entropy_nats_t1"]["spec_bench"]["all"]
    assert f"{nats:.2f} nats of entropy a token at temperature 1 on Spec-Bench" in " ".join(
        page.split()
    )


def test_what_the_noise_is_worth_is_what_was_measured() -> None:
    """Both pages say the same figures, of whole Spec-Bench at temperature 1."""
    record = json.loads((RESULTS / "accept-smollm2.json").read_text())
    found = {
        (r["drafter"], r.get("noise", True)): f"{r['accept_length']:.2f}"
        for r in record["rows"]
        if (r["dataset"], r["group"], r["temperature"]) == ("spec_bench", "all", 1.0)
        and r["nodes"] == {"dflash": 7, "ddtree": 32}.get(r["drafter"])
    }
    chain, tree = ([found[name, noise] for noise in (True, False)] for name in ("dflash", "ddtree"))
    assert (
        f"accept length is {chain[0]} with the noise and {chain[1]} by q alone, that of the tree of "
        f"32 nodes {tree[0]} and {tree[1]}"
    ) in text("docs/dflash.md")
    assert (
        f"{chain[0]} against {chain[1]} for the chain and {tree[0]} against {tree[1]} for the tree"
    ) in text("docs/acceptance.md")


def test_acceptance_was_measured_with_the_weights_that_ship() -> None:
    """Other weights want other figures."""
    index = json.loads((ROOT / "drafters" / "index.json").read_text())["drafters"]
    record = json.loads((RESULTS / "accept-smollm2.json").read_text())
    shipped = {drafter["folder"]: drafter["digest"] for drafter in index}
    assert {part["drafters"] == shipped for part in record["measured"].values()} == {True}


def readings(record: dict[str, Any]) -> str:
    """The table of a drafter check, as docs/dflash.md has it."""
    width = max(len(trial["by_position"]) for trial in record["trials"])
    rows = [
        ["read", "accept length", "draft 1", *map(str, range(2, width + 1))],
        ["---"] * (width + 2),
    ]
    for trial in record["trials"]:
        shares = [f"{share:.0%}" for share in trial["by_position"]]
        cells = [trial["reading"], f"{trial['accept_length']:.2f}", *shares]
        rows.append(cells + [""] * (width - len(shares)))
    lines = ["|".join(f" {cell} " if cell else " " for cell in row) for row in rows]
    return " ".join(f"|{line}|" for line in lines).replace(" --- ", "---")


def test_what_is_said_of_drafters_that_fit_is_what_their_checks_found() -> None:
    """The tables and quotations of docs/dflash.md; and the records are of the drafters that come along."""
    says = text("docs/dflash.md").replace("> ", "")
    for method in ("dflash", "eagle3"):
        record = json.loads((RESULTS / f"check-drafter-{method}.json").read_text())
        name, digest = record["drafter"]["name"], record["drafter"]["digest"]
        assert name == f"smollm2-135m-{method}"
        assert digest == folder_digest(ROOT / "drafters" / name), "check it anew, and record that"
        assert record["fits"]
        assert readings(record) in says
        if method == "eagle3":
            found = record["vocabulary"]
            assert (
                f"its map covers {100 * found['coverage']:.1f} % of the target's likeliest" in says
            )
            assert f"{found['num_agreeing']} of {found['num_heard']} rows of the head" in says
            continue
        assert f"fits: {record['advice']}" in says
        own, above = record["trials"][:2]
        assert above["reading"] == "taps +1"
        assert (
            f"misread: {above['by_position'][0]:.1%} of first drafts are what the target says, accept "
            f"length {above['accept_length']:.2f} ({above['num_places']} places); read with taps -1 it "
            f"is {own['by_position'][0]:.1%} and {own['accept_length']:.2f}. Name the outputs of layers "
            f"{own['taps']}"
        ) in says


def test_what_the_readme_says_of_the_trained_drafter() -> None:
    """Its speed on HumanEval, greedy and sampled, in both kinds of weights."""
    record = json.loads((RESULTS / "accept-smollm2.json").read_text())
    found = {
        (r["weights"], r["temperature"]): r["speed_ratio"]
        for r in record["rows"]
        if (r["drafter"], r["dataset"], r["group"]) == ("ddtree", "human_eval", "all")
        and r["speed_ratio"] is not None
    }
    says = text("README.md")
    assert f"come {found['bf16', 0.0]:.1f} times as fast as plain decoding in bf16" in says
    assert f"and {found['auto', 0.0]:.1f} times in 4 bits" in says
    sampled = f"at temperature 1 it is {found['bf16', 1.0]:.2f} and {found['auto', 1.0]:.2f}"
    assert sampled in says


LOSSLESS = sorted(RESULTS.glob("lossless-*.json"))


@pytest.mark.parametrize("path", LOSSLESS, ids=lambda path: path.stem)
def test_records_of_losslessness_know_no_exception(path: Path) -> None:
    """Sixty prompts of 128 tokens at two temperatures, all equal to plain decoding, and drafted for."""
    record = json.loads(path.read_text())
    assert record["equal"] is True
    assert (record["workload"]["num_prompts"], record["settings"]["max_tokens"]) == (60, 128)
    assert [r["temperature"] for r in record["results"]] == [0.0, 1.0]
    for result in record["results"]:
        assert result["num_equal"] == 60
        assert result["accept_length"] > 1.0


SPEC_BENCH = {
    "mt_bench": "chat",
    "translation": "translation",
    "summarization": "summary",
    "qa": "questions",
    "math_reasoning": "math",
    "rag": "retrieval",
    "all": "**all**",
}


def bench_rows() -> list[str]:
    """The README's table of drafters that copy, made of what `paceline bench` wrote at 0 and at 1."""
    greedy, sampled = (
        json.loads((RESULTS / f"bench-spec-bench-t{heat}.json").read_text()) for heat in (0, 1)
    )
    for record, heat in ((greedy, 0.0), (sampled, 1.0)):
        assert record["settings"]["temperature"] == heat
        assert record["workload"]["groups"] == dict.fromkeys(list(SPEC_BENCH)[:-1], 10)
        assert {result["num_different"] for result in record["results"]} == {0}
    lines = ["| drafter | " + " | ".join(SPEC_BENCH.values()) + " |", "|---" * 8 + "|"]
    lines.append("| `none` |" + " 1.00 (1.00) / 1.00 (1.00) |" * 7)
    for one, other in zip(greedy["results"], sampled["results"], strict=True):
        assert one["spec"] == other["spec"]
        cells = []
        for group in SPEC_BENCH:
            pair = [
                next(g for g in result["groups"] if g["group"] == group) for result in (one, other)
            ]
            cells.append(
                " / ".join(f"{g['accept_length']:.2f} ({g['speed_ratio']:.2f})" for g in pair)
            )
        lines.append(f"| `{one['spec']}` | " + " | ".join(cells) + " |")
    return lines


def test_the_table_of_drafters_that_copy_is_the_bench_s() -> None:
    """Accept length and speed on Spec-Bench's six groups, every drafter, both temperatures."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(bench_rows()) in page
    assert {line.split("`")[1] for line in bench_rows()[2:]} == {
        "none",
        "ngram",
        "suffix:path",
        "suffix",
    }
