"""Records and warnings of server benches. Makes them; printing is the command line's."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import cast

from paceline.bench.serve_prompts import RandomPrompts
from paceline.bench.serve_run import ServeReport, ServeRun, ServeSettings, completed
from paceline.bench.serve_summary import METRICS, Json, accept_length, summarise
from paceline.bench.workload import Workload

SCHEMA = "paceline-bench-serve/1"
_FEW = 2  # requests per place of a closed loop, below which its start and end weigh
_CACHED = 0.3  # share of prompt tokens
_DIFFERENT = 0.05
_APART = 0.1
CONVENTIONS: Mapping[str, Json] = {
    "ttft": "request sent (connecting included) to first content",
    "tpot": "(E2E - TTFT) / (output tokens - 1) of each request; tokens by the server's usage",
    "itl": "gap between chunks with content; a chunk may hold several tokens, or half a one",
    "e2el": "request sent to the last chunk of the answer",
    "std": "of these values, not of a population",
    "percentiles": "linear between the nearest two",
    "answers_acceptance_length": "tokens per verify step, bonus included, all steps of all answers "
    "pooled, by what each answer tells",
    "answers_acceptance_length_mean": "the same of each answer, then their mean",
    "spec_decode_acceptance_length": "by the server's counters, whose drafts are, as a rule, only the "
    "steps that had any: 1 + accepted / drafts",
    "acceptance_length": "of a summary: by answers where they tell, else by counters",
    "acceptance_rate": "accepted share of the drafted tokens, in percent",
    "per_position_acceptance_rates": "share of steps that accepted at least 1, 2, ... tokens",
    "failed requests": "are in no figure but their number",
}
RANDOM_IDS = "prompts are random token ids: speed is measured, but what is accepted of drafts says nothing about text"
INFLATES = (
    "ignore_eos or min_tokens with real prompts: text after the end of an answer repeats itself and "
    "inflates accept length"
)


def warnings_of(
    report: ServeReport, settings: ServeSettings, workload: Workload | RandomPrompts
) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if isinstance(workload, RandomPrompts):
        found.append(RANDOM_IDS)
    else:
        bodies = [{**settings.extra, **variant} for variant in settings.variants.values()]
        if any(body.get("ignore_eos") or body.get("min_tokens") for body in bodies):
            found.append(INFLATES)
        asked = settings.num_prompts
        if asked > len(workload.prompts):
            found.append(
                f"prompts come again: {asked} requests from {len(workload.prompts)} prompts; what "
                "the server remembers of the first time makes the second one faster"
            )
    if not settings.salt and len(report.runs) > 1:
        found.append(
            "no cache_salt: runs may profit from what those before left in the server's prefix "
            "cache and suffix tree"
        )
    short = [
        load.concurrency
        for load in settings.loads
        if load.concurrency is not None and settings.num_prompts < _FEW * load.concurrency
    ]
    if short:
        found.append(
            f"few requests ({settings.num_prompts}) for {', '.join(map(str, short))} at a time: a run's "
            "start and end weigh; ask for more with --num-prompts"
        )
    for run in report.runs:
        found += [f"{label(run)}: {said}" for said in _of_run(run)]
    if report.interrupted:
        found.append(f"interrupted: only the first {len(report.runs)} runs are here")
    apart = max(_numbers(summaries(report, settings), "spread"), default=0.0)
    if apart > _APART:
        found.append(
            f"repeats lie up to {apart:.0%} apart: measure again when nothing else uses the machine"
        )
    return found


def _of_run(run: ServeRun) -> list[str]:
    good = completed(run)
    found = []
    unknown = sum(a.output_tokens is None for a in good)
    if unknown:
        found.append(
            f"{unknown} of {len(good)} answers came without usage: they have no TPOT, and there is "
            "no output throughput; chunks are not counted in place of tokens"
        )
    cached = sum(a.cached_tokens or 0 for a in good)
    prompt = sum(a.prompt_tokens or 0 for a in good)
    if cached > _CACHED * prompt:
        found.append(
            f"{cached / prompt:.0%} of the prompt tokens came from the server's prefix cache"
        )
    complaint = run.measured.complaint()
    contradiction = None if run.counters is None else run.counters.contradiction()
    undrafted = None if contradiction else _undrafted(run)
    return [*found, *(said for said in (undrafted, complaint, contradiction, run.note) if said)]


def _undrafted(run: ServeRun) -> str | None:
    """That a server did not draft in all steps, where it makes two accept lengths of one."""
    good = completed(run)
    by_answers = accept_length(good)
    by_counters = None if run.counters is None else run.counters.accept_length
    if by_answers is None or by_counters is None or run.counters is None:
        return None
    if abs(by_answers / by_counters - 1) <= _DIFFERENT:
        return None
    steps = sum(a.speculation.num_steps or 0 for a in good if a.speculation is not None)
    return (
        f"accept length is {by_answers:.2f} over all {steps} steps of the answers, and {by_counters:.2f} "
        f"over the {run.counters.num_drafts} steps that the server's counters call drafts"
    )


def label(run: ServeRun) -> str:
    """Which run, in words."""
    variant = f"{run.variant}, " if run.variant else ""
    repeat = f", repeat {run.repeat + 1}" if run.repeat else ""
    return f"{variant}{run.load}{repeat}"


def broken(report: ServeReport) -> str | None:
    """Why the whole bench failed: nothing completed, or counters that contradict each other."""
    for run in report.runs:
        if not completed(run):
            return f"{label(run)}: no request completed"
        if run.counters is not None and (said := run.counters.contradiction()):
            return f"{label(run)}: {said}"
    return None


def record(
    report: ServeReport,
    settings: ServeSettings,
    workload: Workload | RandomPrompts,
    *,
    command: Sequence[str],
    warnings: Sequence[str] = (),
    detailed: bool = False,
) -> dict[str, Json]:
    """The record: `results` has one entry per run with vLLM's keys, `summary` one per variant and load.

    Args:
        report: what was measured.
        settings: how.
        workload: what was asked.
        command: how the bench was started, without secrets.
        warnings: of `warnings_of`.
        detailed: keep the figures of every request.
    """
    import torch

    from paceline.bench.machine import machine, source, versions

    date = dt.datetime.now(dt.UTC)
    common: dict[str, Json] = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if settings.endpoint == "chat" else "openai",
        "model_id": report.model,
    }
    return {
        "schema": SCHEMA,
        "date": date.isoformat(timespec="seconds"),
        "command": list[Json](command),
        **source(),
        "versions": versions(),
        "client_machine": machine(torch.device("cpu")),
        "server": {"url": settings.url, "model": report.model, **report.server},
        "workload": _describe(workload),
        "settings": _settings(settings),
        "conventions": dict(CONVENTIONS),
        "warnings": list[Json](warnings),
        "summary": list[Json](summaries(report, settings)),
        "results": [
            _rounded(common | summarise(run, settings.goodput, detailed=detailed))
            for run in report.runs
        ],
    }


def summaries(report: ServeReport, settings: ServeSettings) -> list[dict[str, Json]]:
    """Per variant and load: medians over repeats, and the speed against the first variant."""
    piles: dict[tuple[str, int], list[dict[str, Json]]] = {}
    for run in report.runs:
        place = (run.variant, list(settings.loads).index(run.load))
        piles.setdefault(place, []).append(summarise(run, settings.goodput))
    names = list(settings.variants)
    made: list[dict[str, Json]] = []
    ordered = sorted(piles.items(), key=lambda item: (item[0][1], names.index(item[0][0])))
    for (variant, number), pile in ordered:
        speeds = _numbers(pile, "output_throughput")
        plain = _numbers(piles.get((names[0], number), []), "output_throughput")
        row: dict[str, Json] = {
            "variant": variant,
            "max_concurrency": pile[0]["max_concurrency"],
            "request_rate": pile[0]["request_rate"],
            "repeats": len(pile),
            "completed": sum(cast("int", p["completed"]) for p in pile),
            "failed": sum(cast("int", p["failed"]) for p in pile),
            "acceptance_length": _median(
                _numbers(pile, "answers_acceptance_length")
                or _numbers(pile, "spec_decode_acceptance_length")
            ),
            "spread": (max(speeds) - min(speeds)) / median(speeds) if len(speeds) > 1 else None,
            "over_first_variant": median(speeds) / median(plain) if speeds and plain else None,
        }
        keys = ["output_throughput", "total_token_throughput", "request_throughput"]
        keys += [f"{p}_{m}_ms" for m in METRICS for p in ("mean", "p50", "p99")]
        keys += ["request_goodput"] if settings.goodput else []
        row |= {key: _median(_numbers(pile, key)) for key in keys}
        made.append(cast("dict[str, Json]", _rounded(row)))
    return made


def _describe(workload: Workload | RandomPrompts) -> Json:
    if isinstance(workload, RandomPrompts):
        return {"random": dict(asdict(workload))}
    from paceline.bench.report import describe

    return describe(workload)


def _settings(settings: ServeSettings) -> Json:
    given = asdict(settings)
    del given["url"], given["loads"]
    given["max_concurrency"] = [load.concurrency for load in settings.loads]
    given["request_rate"] = [
        "inf" if load.rate == float("inf") else load.rate for load in settings.loads
    ]
    given["burstiness"] = settings.loads[0].burstiness
    return cast("Json", given)


def _numbers(pile: Sequence[Mapping[str, Json]], key: str) -> list[float]:
    found = [p.get(key) for p in pile]
    return [value for value in found if isinstance(value, int | float)]


def _median(numbers: Sequence[float]) -> float | None:
    return median(numbers) if numbers else None


def _rounded(value: Json) -> Json:
    """Floats rounded to what was measured: microseconds, of milliseconds nanoseconds."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
