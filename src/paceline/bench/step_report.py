"""Records and tables of measured steps. Makes them; printing is the command line's.

A record is one JSON object; `rows` has an entry for every drafter and case, each with its floor. Keys are
stable; `schema` changes when a meaning does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from paceline.bench.report import header
from paceline.bench.step_cases import Case, Spec
from paceline.cost.hardware import Hardware
from paceline.cost.model import Draft, Floor, Load, step_floor

if TYPE_CHECKING:
    from paceline.bench.clocks import Clocks
    from paceline.bench.machine import Json
    from paceline.bench.steps import Measured, Settings
    from paceline.core.config import EngineConfig, ModelConfig
    from paceline.models import LoadedModel

SCHEMA = "paceline-steps/1"
_STAGES = ("propose", "select", "verify", "walk", "commit", "observe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A drafter's figures for one case, with its floor."""

    spec: Spec
    measured: Measured
    floor: Floor
    plain_ms: float | None  # of the same case without a drafter; None: not measured
    even_ms: float | None  # of the same case and as many nodes, all rows alike; None: as plain

    @property
    def ms(self) -> float:
        """Milliseconds a step: the median of the repeats."""
        return 1e3 * statistics.median(self.measured.repeats)

    @property
    def spread(self) -> float:
        """Slowest over fastest repeat, as a share of the median."""
        repeats = self.measured.repeats
        return (max(repeats) - min(repeats)) / statistics.median(repeats)

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.measured.case.sequences * self.measured.accept_length * 1e3 / self.ms


def draft_of(spec: Spec) -> Draft | None:
    """A drafter's network in the words of the cost model."""
    net = spec.net
    if net is None:
        return None
    positions = min(net.num_proposals, spec.nodes - 1)
    return Draft(
        layers=net.layer_config(),
        block=net.block_size,
        positions=positions,
        num_taps=len(net.target_layer_ids),
        target_hidden_size=net.target_hidden_size,
    )


def lines(
    found: Sequence[tuple[Spec, Sequence[Measured]]],
    model: ModelConfig,
    hardware: Hardware,
    nbytes: int,
) -> list[Line]:
    """Put beside each figure its floor, and what the same case takes without a drafter.

    Args:
        found: what was measured, by drafter.
        model: the target.
        hardware: the device's ceilings.
        nbytes: of a weight, key or value.
    """
    plain: dict[Case, float] = {
        m.case: 1e3 * statistics.median(m.repeats)
        for spec, measured in found
        if spec.method == "none"
        for m in measured
    }
    even: dict[tuple[int, Case], float] = {
        (spec.nodes, m.case): 1e3 * statistics.median(m.repeats)
        for spec, measured in found
        if spec.method == "chain"
        for m in measured
    }
    return [
        Line(
            spec=spec,
            measured=m,
            floor=step_floor(
                model,
                Load(
                    sequences=m.case.sequences,
                    context=m.case.context,
                    nodes=spec.nodes,
                    nbytes=nbytes,
                    accepted=m.accept_length,
                ),
                hardware,
                draft_of(spec),
            ),
            plain_ms=plain.get(m.case),
            even_ms=even.get((spec.nodes, m.case)) if spec.method == "uneven" else None,
        )
        for spec, measured in found
        for m in measured
    ]


def record(
    rows: Sequence[Line],
    settings: Settings,
    config: EngineConfig,
    hardware: Hardware,
    *,
    model: Mapping[str, Json],
    command: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Json]:
    """The record of a run."""
    return {
        **header(SCHEMA, command, config),
        "model": dict(model),
        "ceilings": _ceilings(hardware),
        "settings": {
            "steps": settings.steps,
            "repeats": settings.repeats,
            "warmup": settings.warmup,
            "rest_s": settings.rest,
            "stage_steps": settings.stage_steps,
            "synthetic_rates": None if settings.rates is None else list(settings.rates),
            "seed": settings.seed,
        },
        "conventions": {
            "ms_per_step": "median over repeats of the mean of a repeat's steps, host clock, back to back",
            "spread": "slowest less fastest repeat over the median",
            "nodes": "tokens verified for a sequence, root included; on average where not all have as many",
            "most_nodes": "of one sequence",
            "over_plain": "ms_per_step over that of none in the same case",
            "over_even": "of uneven: ms_per_step over that of a chain of as many nodes, same case",
            "context": "tokens of a prompt; sequences grow from there during a repeat",
            "floor_ms": "least time by the ceilings: reading and computing only (cost/model.py)",
            "stages_ms": "a run of its own without graphs: where the host is slower, its gaps count",
            "accept_length": "emitted tokens per sequence and step, bonus included",
            "clocks": "of a GPU in a repeat that is not counted, medians; ceilings hold at the highest "
            "clock; power_capped: share of the time in which it was lowered for the power's sake",
        },
        "notes": list(notes),
        "rows": [_row(line) for line in rows],
    }


def shape(loaded: LoadedModel, *, random_weights: bool) -> dict[str, Json]:
    """Which target: its name and its sizes. Where it lies is nobody's business but its owner's."""
    config = loaded.config
    return {
        "name": Path(loaded.files.name).name,
        "random_weights": random_weights,
        "architecture": config.architecture,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
    }


def _ceilings(hardware: Hardware) -> Json:
    return {
        "name": hardware.name,
        "read_bandwidth": hardware.read_bandwidth,
        "matmul_rate": hardware.matmul_rate,
        "launch": hardware.launch,
        "read_rise": [[rows, round(factor, 4)] for rows, factor in hardware.read_rise],
    }


def _row(line: Line) -> Json:
    spec, measured = line.spec, line.measured
    return {
        "drafter": spec.method,
        "spec": spec.name,
        "block": None if spec.net is None else spec.net.block_size,
        "nodes": spec.nodes,
        "most_nodes": spec.most,
        "sequences": measured.case.sequences,
        "context": measured.case.context,
        "ms_per_step": round(line.ms, 4),
        "floor_ms": round(1e3 * line.floor.total, 4),
        "floor_parts_ms": {k: round(1e3 * v, 4) for k, v in asdict(line.floor).items() if v},
        "over_plain": None if line.plain_ms is None else round(line.ms / line.plain_ms, 4),
        "over_even": None if line.even_ms is None else round(line.ms / line.even_ms, 4),
        "spread": round(line.spread, 4),
        "repeats_ms": [round(1e3 * seconds, 4) for seconds in measured.repeats],
        "accept_length": round(measured.accept_length, 4),
        "tokens_per_second": round(line.tokens_per_second, 2),
        "steps_without_graph": measured.without_graph,
        "graphs_captured": measured.captured,
        "stages_ms": {k: round(1e3 * v, 4) for k, v in measured.stages.items()} or None,
        "ungraphed_ms": None if measured.ungraphed is None else round(1e3 * measured.ungraphed, 4),
        "clocks": None if measured.clocks is None else dict(asdict(measured.clocks)),
    }


def table(rows: Sequence[Line]) -> Table:
    """One line a case: its time, its floor, its ratios, what it emits."""
    shown = _with_cases("milliseconds a step", rows)
    clocked = any(line.measured.clocks for line in rows)
    names = ("ms", "+-", "floor", "x floor", "x plain", "accept", "tokens/s", "no graph")
    for name in (*names, *(("MHz", "W") if clocked else ())):
        shown.add_column(name, justify="right")
    for line in _sections(shown, rows):
        floor, measured = 1e3 * line.floor.total, line.measured
        shown.add_row(
            *_cells(line),
            _short(line.ms),
            f"{line.spread:.1%}",
            _short(floor),
            f"{line.ms / floor:.2f}",
            "" if line.plain_ms is None else f"{line.ms / line.plain_ms:.2f}",
            f"{measured.accept_length:.2f}",
            f"{line.tokens_per_second:.0f}",
            str(measured.without_graph),
            *(_clock_cells(measured.clocks) if clocked else ()),
        )
    return shown


def _clock_cells(clocks: Clocks | None) -> tuple[str, str]:
    if clocks is None:
        return "", ""
    limit = " (limit)" if clocks.power_capped > 0.5 else ""
    return f"{clocks.sm_mhz:.0f}", f"{clocks.watts:.0f}{limit}"


def parts_table(rows: Sequence[Line]) -> Table:
    """The parts of each case's step, from the run without graphs, and that run's whole step."""
    shown = _with_cases("milliseconds a step by part: a run of its own, without graphs", rows)
    parts = [s for s in _STAGES if any(s in line.measured.stages for line in rows)]
    for name in (*parts, "whole"):
        shown.add_column(name, justify="right")
    for line in _sections(shown, rows):
        stages, whole = line.measured.stages, line.measured.ungraphed
        found = [_short(1e3 * stages[p]) if p in stages else "" for p in parts]
        shown.add_row(*_cells(line), *found, "" if whole is None else _short(1e3 * whole))
    return shown


def _with_cases(title: str, rows: Sequence[Line]) -> Table:
    """A table whose first columns say which case a line is about."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("drafter", min_width=max(len(_label(line.spec)) for line in rows))
    for name in ("nodes", "sequences", "context"):
        shown.add_column(name, justify="right")
    return shown


def _sections(shown: Table, rows: Sequence[Line]) -> Iterator[Line]:
    """The lines, with a rule between drafters."""
    before = rows[0].spec
    for line in rows:
        if line.spec is not before:
            shown.add_section()
        before = line.spec
        yield line


def _cells(line: Line) -> tuple[str, ...]:
    case = line.measured.case
    return _label(line.spec), str(line.spec.nodes), str(case.sequences), str(case.context)


def _label(spec: Spec) -> str:
    return spec.name if spec.net is None else f"{spec.method}, block {spec.net.block_size}"


def _short(ms: float) -> str:
    return f"{ms:.2f}" if ms >= 1.0 else f"{ms:.3f}"
