"""What docs/serve.md says of the server's cost is what the record says."""

from __future__ import annotations

import json

from tests.records import RESULTS, text


def test_what_the_server_costs_is_the_record_s() -> None:
    """Each row's value, bar and verdict; a bar that was missed is named as such."""
    record = json.loads((RESULTS / "serve-cpu.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    says = text("docs/serve.md")
    assert f"{record['streams']} streams of {record['tokens']} tokens at once" in says
    assert not record["source"]["dirty"]
    assert set(rows) == set(LINES)
    for name, (line, low) in LINES.items():
        row = rows[name]
        met = row["value"] <= row["bar"] if low else row["value"] >= row["bar"]
        assert row["ok"] == met, name
        verdict = "met" if met else "missed"
        assert line.format(value=row["value"], percent=100 * row["value"], verdict=verdict) in says
    spent = rows["http_cost_none"]["baseline"]
    server, clients = spent["server_cpu_us_per_token"], spent["clients_cpu_us_per_token"]
    assert (
        f"A chunk takes the server {server:.0f} µs of one core and the clients {clients:.0f} µs"
        in says
    )
    pairs = len(spent["engine_tokens_per_second"])
    assert f"medians of {pairs} pairs of runs" in says


def test_what_short_answers_cost_is_the_record_s() -> None:
    """It is told beside the others, though it misses their bar."""
    record = json.loads((RESULTS / "serve-cpu-short.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert not record["source"]["dirty"]
    auto, none = rows["http_cost_auto"], rows["http_cost_none"]
    pairs = len(none["baseline"]["engine_tokens_per_second"])
    line = (
        f"with 96 tokens {100 * auto['value']:.1f} % and {100 * none['value']:.1f} % "
        f"([record](../benchmarks/results/serve-cpu-short.json), {pairs} pairs)"
    )
    assert line in text("docs/serve.md")


# Name of a row -> its line, and whether less is better.
LINES = {
    "http_cost_auto": (
        "| the drafter that comes along | {percent:.1f} % | 8 % | {verdict} |",
        True,
    ),
    "http_cost_none": ("| none | {percent:.1f} % | 8 % | {verdict} |", True),
    "first_token_auto": (
        "| the drafter that comes along | {value:.2f} × | 1.3 × | {verdict} |",
        True,
    ),
    "first_token_none": ("| none | {value:.2f} × | 1.3 × | {verdict} |", True),
    "idle_and_queued_memory": ("| {value:.1f} MB | 150 MB | {verdict} |", True),
    "beside_a_slow_reader": ("| {value:.3f} × | 0.95 × | {verdict} |", False),
}
