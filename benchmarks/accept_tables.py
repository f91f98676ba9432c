"""Markdown tables of a record of `accept.py`, as they stand in docs/acceptance.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]

BEGIN: Final = "<!-- tables: python benchmarks/accept.py table -->"
END: Final = "<!-- end of tables -->"
_SETS: Final = {
    "spec_bench": "Spec-Bench",
    "human_eval": "HumanEval",
    "gsm8k": "GSM8K",
    "copy": "copied text",
}
_GROUPS: Final = {
    "mt_bench": "chat",
    "translation": "translation",
    "summarization": "summary",
    "qa": "questions",
    "math_reasoning": "math",
    "rag": "retrieval",
}
_NONE: Final = "—"
_ORDER: Final = ("suffix", "dflash", "ddtree", "eagle3", "merged")
_SERVED: Final = """\
As served on a CPU, one sequence: times as fast as plain decoding with the same weights, and accept
length in brackets; temperature 0 / temperature 1:"""


def tables(record: dict[str, Any]) -> str:
    """All tables of a record: accept lengths by data set, by group, and speeds."""
    slow = [r for r in record["rows"] if r["speed_ratio"] is None]
    long = [r for r in slow if r["device"] == "cuda"]
    some = [r for r in slow if r["device"] == "cpu" and r["group"] == "all"]
    fast = [r for r in record["rows"] if r["speed_ratio"] is not None]
    nats = record["entropy_nats_t1"]
    parts = []
    if long:
        totals = [r for r in long if r["group"] == "all"]
        there = [name for name in _SETS if any(r["dataset"] == name for r in totals)]
        heads = {name: f"{_SETS[name]} ({_prompts(totals, name)})" for name in there}
        parts += [
            "Accept length on whole sets, at temperature 0 / at temperature 1:",
            _grid(totals, heads, "dataset", {n: nats.get(n, {}).get("all") for n in there}),
            "Spec-Bench by group, 80 prompts each, temperature 0 / temperature 1:",
            _grid(
                [r for r in long if r["dataset"] == "spec_bench"],
                _GROUPS,
                "group",
                nats.get("spec_bench", {}),
            ),
        ]
    if some:
        there = [name for name in _SETS if any(r["dataset"] == name for r in some)]
        heads = {name: f"{_SETS[name]} ({_prompts(some, name)})" for name in there}
        parts += [
            "The prompts of this repository, on a CPU, temperature 0 / temperature 1:",
            _grid(some, heads, "dataset", {}),
        ]
    if fast:
        parts += [
            _SERVED,
            _speeds([r for r in fast if r["group"] == "all"]),
        ]
    return "\n\n".join(parts)


def put(page: Path, record: dict[str, Any]) -> None:
    """Write the tables between the page's two marks.

    Raises:
        ValueError: the page has no marks.
    """
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tables(record)}\n\n{END}{after}", encoding="utf-8")


def name(row: Row) -> str:
    """A drafter with what it is made of."""
    parts = f" ({' + '.join(row['parts'])})" if row.get("parts") else ""
    odds = "" if row.get("noise", True) else ", ranked by its odds alone"
    return f"`{row['drafter']}`{parts}{odds}"


def _grid(rows: Sequence[Row], heads: dict[str, str], key: str, nats: dict[str, Any]) -> str:
    """One line for each drafter and number of nodes, one column for each of `heads`."""
    ways = list(dict.fromkeys((name(r), r["nodes"]) for r in sorted(rows, key=_rank)))
    found = {(name(r), r["nodes"], r[key], r["temperature"]): r["accept_length"] for r in rows}
    lines = [
        f"| drafter | nodes | {' | '.join(heads.values())} |",
        "|---|---|" + "---|" * len(heads),
    ]
    for way in ways:
        cells = [" / ".join(_two(found.get((*way, h, t))) for t in (0.0, 1.0)) for h in heads]
        lines.append(f"| {way[0]} | {way[1]} | {' | '.join(cells)} |")
    if not nats:
        return "\n".join(lines)
    cells = [_two(nats.get(h)) for h in heads]
    lines.append(
        f"| *the model's entropy at temperature 1, nats a token* | | {' | '.join(cells)} |"
    )
    return "\n".join(lines)


def _speeds(rows: Sequence[Row]) -> str:
    ranked = sorted(rows, key=_rank)
    ways = list(dict.fromkeys((name(r), r["nodes"], r["weights"]) for r in ranked))
    sets = [s for s in _SETS if any(r["dataset"] == s for r in rows)]
    found = {(name(r), r["nodes"], r["weights"], r["dataset"], r["temperature"]): r for r in rows}
    lines = [
        f"| drafter | nodes | weights | {' | '.join(_SETS[s] for s in sets)} |",
        "|---|---|---|" + "---|" * len(sets),
    ]
    for way in ways:
        cells = []
        for data in sets:
            pair = [found.get((*way, data, t)) for t in (0.0, 1.0)]
            cells.append(" / ".join(_speed(r) for r in pair))
        lines.append(f"| {way[0]} | {way[1]} | {way[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rank(row: Row) -> tuple[int, int]:
    return _ORDER.index(row["drafter"]) if row["drafter"] in _ORDER else -1, row["nodes"]


def _speed(row: Row | None) -> str:
    return _NONE if row is None else f"{row['speed_ratio']:.2f} ({row['accept_length']:.2f})"


def _two(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _prompts(rows: Sequence[Row], dataset: str) -> str:
    return str(max((r["prompts"] for r in rows if r["dataset"] == dataset), default=0))
