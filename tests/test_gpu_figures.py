"""Figures of a GPU in the README and the documentation are those of the records that they point to."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.records import RESULTS, text


def step_rows(name: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Rows of a record of steps, by drafter, sequences and context; none ran without a graph."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    for row in rows:
        assert row["steps_without_graph"] == row["graphs_captured"] == 0
    return {(r["spec"], r["sequences"], r["context"]): r for r in rows}


CHAIN, TREE = "dflash:qwen3-8b-dflash-b16", "ddtree:qwen3-8b-dflash-b16:32"
KINDS_OF_LENGTH = ("new_length_ms", "known_length_ms", "chunk_of_2048_ms")
SHORT = "dflash:qwen3-8b-dflash-b8"


def test_steps_on_a_gpu_are_those_measured() -> None:
    """Milliseconds of every case in all four records, and the least."""
    names_of = ("-first", "-second", "-third", "")
    first, second, third, last = records = [step_rows(f"h200-steps{name}") for name in names_of]
    names = {
        "none": "plain decoding",
        "dflash": "DFlash, block {block}",
        "ddtree": "DDTree, 32 nodes",
    }
    says = text("docs/performance.md")
    assert first.keys() == second.keys()
    for some in (third, last):
        assert some.keys() == first.keys() - {(TREE, 64, 1024)}, "what the last runs left out"
    for key, row in first.items():
        name = names[row["drafter"]].format(block=row["block"])
        found = [f"{r[key]['ms_per_step']:.2f}" if key in r else "–" for r in records]
        cells = rf"{' . '.join(found)} \| {row['floor_ms']:.2f} \|".replace(" . ", r" \| ")
        assert re.search(rf"\| {name}, {row['sequences']}( sequence)? \| {cells}", says), (
            name,
            key,
        )
    after = {key[:2]: row["ms_per_step"] for key, row in last.items()}
    assert f"costs {after[TREE, 1] / after[CHAIN, 1]:.2f} times the chain of 16" in says
    assert f"({after[CHAIN, 64]:.2f} ms for 64 sequences against {after['none', 64]:.2f})" in says
    rested = {key[:2]: row["ms_per_step"] for key, row in step_rows("h200-steps-rested").items()}
    pairs = [f"{rested[spec, 64]:.2f} ms in place of {after[spec, 64]:.2f}" for spec in (CHAIN,)]
    pairs += [f"blocks of 8 {rested[SHORT, 64]:.2f} in place of {after[SHORT, 64]:.2f}"]
    flat = " ".join(says.split())
    assert all(pair in flat for pair in pairs), pairs
    assert f"{last[CHAIN, 64, 1024]['clocks']['sm_mhz']:,.0f} MHz at 700 W" in flat
    readme = text("README.md")
    plain, drafted = ([after[spec, n] for n in (1, 8, 64)] for spec in ("none", CHAIN))
    for ms in (plain, drafted):
        assert f"{ms[0]:.2f}, {ms[1]:.2f} and {ms[2]:.2f} ms" in readme


def test_ratios_on_a_gpu_are_those_measured() -> None:
    """Of more nodes to one, of uneven trees to even ones, and of the batch-invariant mode."""
    rows, says = step_rows("h200-ratios"), text("docs/performance.md")
    for n, context in ((1, 1024), (8, 1024), (1, 32_768)):
        one, many = (rows[spec, n, context]["ms_per_step"] for spec in ("none", "chain:16"))
        line = f"| {n} × {context:,} | {one:.2f} | {many:.2f} | {many / one:.3f} |"
        assert line in says, line
    even, uneven = (rows[s, 64, 1024]["ms_per_step"] for s in ("chain:4", "uneven:4:16"))
    assert f"take {uneven:.2f} ms, with 4 nodes each {even:.2f}: {uneven / even:.2f} times" in says
    usual, invariant = step_rows("h200-steps-third"), step_rows("h200-invariant")
    pairs = [(usual["none", n, 1024], invariant["none", n, 1024]) for n in (1, 8, 64)]
    ms = [other["ms_per_step"] for _, other in pairs]
    ratios = [other["ms_per_step"] / one["ms_per_step"] for one, other in pairs]
    assert f"{ms[0]:.2f}, {ms[1]:.2f} and {ms[2]:.2f} ms at 1, 8 and 64" in says
    written = f"{ratios[0]:.2f}, {ratios[1]:.2f} and {ratios[2]:.2f}"
    assert f"{written} times the usual" in says
    assert f"{written} times the usual one" in text("docs/gpu-invariance.md")


def test_attention_on_a_gpu_is_that_measured() -> None:
    """Microseconds, share of bandwidth and what SDPA takes, of every shape and number of nodes."""
    record = json.loads((RESULTS / "h200-attention.json").read_text())
    says = text("docs/gpu-attention.md")
    for line in record["lines"]:
        nodes = {"1-16": "1 to 16, 256 in all", "16 block": "16, a draft block"}
        cells = (
            f"| {nodes.get(line['nodes'], line['nodes'])} | {line['layer_us']:.0f} | "
            f"{100 * line['of_read_bandwidth']:.0f} % | "
        )
        row = rf"{re.escape(cells)}[\d.]+ \| {line['sdpa_layer_us'] / line['layer_us']:.1f} × \|"
        assert re.search(row, says), cells


def test_prompts_on_a_gpu_are_those_measured() -> None:
    """Milliseconds and memory of each way."""
    says = text("docs/gpu-attention.md")
    for row in json.loads((RESULTS / "h200-prompts.json").read_text())["rows"]:
        ms = " | ".join(f"{row[k]:.2f}" for k in KINDS_OF_LENGTH)
        line = f"| {row['way']} | {ms} | {row['host_kb_a_new_length']:,.0f} |"
        assert line in says, line


def test_the_widened_model_is_as_fast_as_measured() -> None:
    """Tokens a second, against no drafter, and accept lengths beside the small model's."""
    record = json.loads((RESULTS / "h200-widened.json").read_text())
    says, readme = text("docs/widened.md"), text("README.md")
    for row in record["rows"]:
        assert row["steps_without_graph"] == row["graphs_captured"] == 0
        small = row["accept_length_recorded"]
        line = (
            f"| {row['sequences']} | {row['tok_s']:,.0f} | {row['over_plain']:.2f} | "
            f"{row['accept_length']:.2f} | {'' if small is None else f'{small:.2f}'} |"
        )
        assert " ".join(line.split()) in says, line
        if small is not None and row["drafter"] != "merged":
            assert abs(row["over_recorded"] - 1) < 0.03
    best = {(r["drafter"], r["sequences"]): r["over_plain"] for r in record["rows"]}
    assert f"{best['ddtree', 1]:.1f} times as fast as plain decoding at one sequence" in readme
    assert f"{best['dflash', 8]:.1f} times at 8 (`dflash`)" in readme


def test_the_widened_model_parts_from_the_small_one_at_near_ties() -> None:
    """In every row, under the stated margin; a clear choice that fell otherwise would be another model."""
    rows = json.loads((RESULTS / "h200-widened.json").read_text())["rows"]
    found = [row["differences"] for row in rows]
    margin = 0.5
    assert all(some["parted"] for some in found)
    largest = max(some["largest_margin_nats"] for some in found)
    assert largest < margin
    medians = [some["median_margin_nats"] for some in found]
    (anywhere,) = {some["median_margin_anywhere_nats"] for some in found}
    assert anywhere > 7 * margin, "what a clear choice is"
    says = text("docs/widened.md")
    assert f"less than {margin} nats apart" in says
    few = (
        f"{min(medians):.2f} to {max(medians):.2f} nats apart in the median, {largest:.2f} at most"
    )
    assert few in says, few
    assert f"they are {anywhere:.1f} apart in the median" in says
    equal, parted = (sum(some[key] for some in found) for key in ("equal", "parted"))
    assert 0.30 < equal / (equal + parted) < 0.37, "about a third"


def test_a_step_s_results_are_copied_in_the_time_measured() -> None:
    """Microseconds of the copy, and of what steps: profiles that list it."""
    record = json.loads((RESULTS / "h200-profiles.json").read_text())
    found = [
        (kernel["us"], profile["ms_per_step"], kernel["calls"])
        for profile in record["profiles"]
        for kernel in profile["kernels"]
        if kernel["name"].startswith("Memcpy DtoH")
    ]
    (us,) = {copy for copy, _, _ in found}
    assert {calls for *_, calls in found} == {1.0}, "one copy a step"
    steps = [ms for _, ms, _ in found]
    says = " ".join(text("docs/gpu-step.md").split())
    said = f"the copy takes {us} µs, of steps of {min(steps):.2f} to {max(steps):.2f} ms"
    assert said in says, said
