"""Measures the engine core on this CPU and writes one record: `make bench-cpu`.

Rows of {name, value, unit, baseline, bar, ok}, every comparison made side by side in one run. All
figures are ratios of medians, or counts; absolute times on a shared machine mean little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from cpu_peers import Answer, llama_cpp_answer, transformers_answer
from cpu_steps import TOKENS, Row, config, draft_step, host_share, row, verify8

from paceline import models
from paceline.api.tokenizer import Tokenizer
from paceline.bench import workload
from paceline.bench.machine import machine, source, versions
from paceline.bench.run import Settings, Task, run
from paceline.bench.summary import differences, summarise
from paceline.cli.workbench import encode
from paceline.core import device
from paceline.core.request import Request, SamplingParams
from paceline.engine.engine import Engine

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts"


def answer_of(engine: Engine) -> Answer:
    """The engine as a function from prompt ids to emitted ids."""

    def answer(prompt: Sequence[int], count: int) -> Sequence[int]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add(Request(id="bench", prompt_ids=tuple(prompt), params=params))
        out: list[int] = []
        while engine.has_work:
            for step in engine.step():
                out += step.token_ids
        return out

    return answer


def speeds(ways: dict[str, Answer], tasks: Sequence[Task]) -> dict[str, list[float]]:
    """Decoded tokens per second of every way and prompt, taking turns; prefill is left out.

    The time of one token is taken off, from a run of the same prompt that stops there.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for task in tasks:
        for name, answer in ways.items():
            answer(task.prompt_ids, 1)
            start = time.perf_counter()
            answer(task.prompt_ids, 1)
            first = time.perf_counter()
            answer(task.prompt_ids, TOKENS)
            end = time.perf_counter()
            found[name].append((TOKENS - 1) / ((end - first) - (first - start)))
    return found


def autoregressive(tasks: Sequence[Task], threads: int) -> tuple[list[Row], dict[str, object]]:
    """ar_bf16 and ar_4bit against transformers' bf16, with the other peers beside them."""
    ways: dict[str, Answer] = {
        "paceline_bf16": answer_of(Engine.build(config("none"))),
        "paceline_4bit": answer_of(Engine.build(config("none", weights="4bit"))),
        "transformers_bf16": transformers_answer(torch.bfloat16),
        "transformers_float32": transformers_answer(torch.float32),
    }
    try:
        ways["llama_cpp_q4_1"] = llama_cpp_answer(threads)
    except ImportError as error:
        print(f"llama.cpp is left out: {error}", flush=True)
    found = speeds(ways, tasks)
    middle = {name: statistics.median(values) for name, values in found.items()}
    peers = {
        name: {"tokens_per_second": round(value, 1), "all": [round(v, 1) for v in found[name]]}
        for name, value in middle.items()
    }
    base = [round(v, 2) for v in found["transformers_bf16"]]

    def ratio(name: str) -> float:
        return statistics.median(
            a / b for a, b in zip(found[name], found["transformers_bf16"], strict=True)
        )

    about = {"transformers_bf16_tokens_per_second": base}
    return [
        row("ar_bf16", ratio("paceline_bf16"), "x transformers", 1.5, baseline=about, low=False),
        row("ar_4bit", ratio("paceline_4bit"), "x transformers", 2.8, baseline=about, low=False),
    ], peers


def batch8(engine: Engine, tasks: Sequence[Task]) -> Row:
    """Throughput of eight concurrent sequences over one's, decoding only."""

    def decode_rate(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        for i, task in enumerate(tasks[:count]):
            engine.add(Request(id=str(i), prompt_ids=tuple(task.prompt_ids[:200]), params=params))
        steps: list[float] = []
        while engine.has_work:
            start = time.perf_counter()
            outs = engine.step()
            if len(outs) == count:
                steps.append(time.perf_counter() - start)
        return count / statistics.median(steps[1:])

    ratios, ones = [], []
    for _ in range(5):
        one = decode_rate(1)
        ones.append(round(one, 1))
        ratios.append(decode_rate(8) / one)
    return row(
        "batch8",
        statistics.median(ratios),
        "x one sequence",
        5.0,
        baseline={"one_sequence_tokens_per_second": ones},
        low=False,
    )


def speculation(
    name: str,
    loaded: models.LoadedModel,
    tasks: Sequence[Task],
    stops: frozenset[int],
    bar: float,
    temperature: float,
) -> Row:
    """`suffix` over its own autoregressive baseline on a set of prompts."""
    engine = Engine.build(config("suffix"), loaded=loaded)
    settings = Settings(max_tokens=128, temperature=temperature)
    slices = run(engine, tasks, settings, stop_ids=stops)
    overall = summarise(slices, tasks)[-1]
    unequal = len(differences(slices))
    assert unequal == 0, f"{name}: {unequal} outputs differ from autoregressive"
    return row(
        name,
        overall.speed_ratio,
        "x own AR",
        bar,
        baseline={"accept_length": round(overall.accept_length, 3), "outputs_differ": unequal},
        low=False,
    )


def prefix_hit(engine: Engine, tasks: Sequence[Task]) -> Row:
    """Prompt tokens that a second request with an equal 1,000-token prompt computes."""
    prompt = tuple(t for task in tasks for t in task.prompt_ids)[:1000]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    computed = []
    for name in ("first", "second"):
        before = engine.report()["num_prefill_tokens"]
        engine.add(Request(id=name, prompt_ids=prompt, params=params))
        while engine.has_work:
            engine.step()
        computed.append(engine.report()["num_prefill_tokens"] - before)
    size = engine.config.cache.page_size
    return row(
        "prefix_hit",
        computed[1],
        "tokens",
        size,
        baseline={"first_request": computed[0], "page_size": size},
        low=True,
    )


def peak_memory() -> Row:
    """Peak resident memory of a process of its own with 8 sequences of 2,048 tokens."""
    done = subprocess.run(
        [sys.executable, __file__, "--child-memory"], check=True, capture_output=True, text=True
    )
    gigabytes = float(done.stdout.split()[-1])
    return row("peak_memory", gigabytes, "GB", 1.6, baseline={"sequences": 8}, low=True)


def child_memory() -> None:
    """The process that `peak_memory` measures."""
    engine = Engine.build(config("suffix"))
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    for i in range(8):
        prompt = tuple((7 * i + 13 * k) % 40_000 + 100 for k in range(1920))
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work:
        engine.step()
    print(device.peak_memory(torch.device("cpu")) / 1e9)


def second_start() -> Row:
    """From starting a second process to the first text on its standard output, seconds."""
    command = [sys.executable, "-m", "paceline.cli", "generate", "Say hello.", "--max-tokens", "8"]
    times = []
    for _ in range(6):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            child.stdout.read(1)
            times.append(time.perf_counter() - start)
            child.stdout.read()
    later = [round(t, 2) for t in times[1:]]
    return row(
        "second_start",
        statistics.median(later),
        "s",
        6.0,
        baseline={"first": round(times[0], 2), "later": later},
        low=True,
    )


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu-core.json")
    parser.add_argument("--only", nargs="*", help="names of rows to measure")
    parser.add_argument("--child-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child_memory:
        child_memory()
        return
    tokens = Tokenizer.from_files(models.resolve("default").path)
    spec_bench = encode(workload.load([PROMPTS / "spec_bench.jsonl"]), tokens)
    copy = encode(workload.load([PROMPTS / "copy.jsonl"]), tokens)
    short = [t for t in spec_bench if len(t.prompt_ids) < 500]
    sample = short[:: max(1, len(short) // 7)][:7]
    loaded = Engine.build(config("none")).loaded
    stops = frozenset(tokens.eos_token_ids) | frozenset(loaded.config.eos_token_ids)
    threads = torch.get_num_threads()
    plain = Engine.build(config("none"), loaded=loaded)
    peers: dict[str, object] = {}

    def ar() -> list[Row]:
        rows, found = autoregressive(sample, threads)
        peers.update(found)
        return rows

    def spec(name: str, tasks: list[Task], bar: float, heat: float) -> Callable[[], list[Row]]:
        return lambda: [speculation(name, loaded, tasks, stops, bar, heat)]

    parts: dict[str, Callable[[], list[Row]]] = {
        "ar_bf16": ar,
        "batch8": lambda: [batch8(plain, short)],
        "verify8": lambda: [verify8(loaded, sample)],
        "host_share": lambda: [host_share(loaded, sample)],
        "draft_step": lambda: [draft_step(loaded, sample)],
        "suffix_copy": spec("suffix_copy", copy, 1.5, 0.0),
        "suffix_specbench_t0": spec("suffix_specbench_t0", spec_bench, 0.95, 0.0),
        "suffix_specbench_t1": spec("suffix_specbench_t1", spec_bench, 0.95, 1.0),
        "prefix_hit": lambda: [prefix_hit(plain, spec_bench)],
        "peak_memory": lambda: [peak_memory()],
        "second_start": lambda: [second_start()],
    }
    started = time.time()
    rows = [r for name, part in parts.items() if not args.only or name in args.only for r in part()]
    record = {
        "schema": "paceline/cpu-core/1",
        "model": "SmolLM2-135M-Instruct",
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "source": source(),
        "minutes": round((time.time() - started) / 60, 1),
        "rows": rows,
        "peers": peers,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
