"""What docs/serve.md says of the server's cost is what the record says."""

from __future__ import annotations

import json
from typing import Any

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
        assert filled(line, row) in says
    spent = rows["http_cost_none"]["baseline"]
    server, clients = spent["server_cpu_us_per_token"], spent["clients_cpu_us_per_token"]
    assert (
        f"A chunk takes the server {server:.0f} µs of one core and the clients {clients:.0f} µs"
        in says
    )


def test_what_short_answers_cost_is_the_record_s() -> None:
    """It is told beside the others, also where it misses their bar."""
    record = json.loads((RESULTS / "serve-cpu-short.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert not record["source"]["dirty"]
    says = text("docs/serve.md")
    for name in ("http_cost_auto", "http_cost_none"):
        line, _ = LINES[name]
        who, rest = line.removeprefix("| ").split(" |", 1)
        assert f"| {who}, answers of 96 tokens |" + filled(rest, rows[name]) in says


def filled(line: str, row: dict[str, Any]) -> str:
    """A line with a row's figures."""
    low, _, high = row["baseline"].get("quartiles", (0, 0, 0))
    return line.format(
        value=row["value"],
        percent=100 * row["value"],
        low=100 * low,
        high=100 * high,
        verdict="met" if row["ok"] else "missed",
    )


# Name of a row -> its line, and whether less is better.
LINES = {
    "http_cost_auto": (
        "| the drafter that comes along | {percent:.1f} % | {low:.1f} to {high:.1f} % | 8 % | {verdict} |",
        True,
    ),
    "http_cost_none": (
        "| none | {percent:.1f} % | {low:.1f} to {high:.1f} % | 8 % | {verdict} |",
        True,
    ),
    "first_token_auto": (
        "| the drafter that comes along | {value:.2f} × | 1.3 × | {verdict} |",
        True,
    ),
    "first_token_none": ("| none | {value:.2f} × | 1.3 × | {verdict} |", True),
    "idle_and_queued_memory": ("| {value:.1f} MB | 150 MB | {verdict} |", True),
    "beside_a_slow_reader": ("| {value:.3f} × | 0.95 × | {verdict} |", False),
}
