"""Measures what the server costs on this CPU and writes one record: `make bench-serve`.

Rows of {name, value, unit, baseline, bar, ok}, with the bundled model and 16 streams. The engine's own
figures and those over HTTP come from one engine in one process, in turns; the clients are another process
on the same cores, so what they cost counts as the server's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from cpu_steps import Row, row
from serve_local import Clients, Local, Switched, process, server_load

from paceline.api.llm import LLM
from paceline.api.server.life import quick_turns
from paceline.bench.machine import machine, source, versions
from paceline.core.device import resident_memory
from paceline.core.garbage import only_new_garbage
from paceline.core.request import Request, SamplingParams, StepOutput

HERE = Path(__file__).parent
STREAMS = 16
TOKENS = 256  # of an answer: as long as those of chats are, since the streams' beginnings count too
ENDLESS = 8000  # of one that outlasts the measurement
ROUNDS = 20  # pairs: machines are shared, and single ones differ by a tenth
FIRSTS = 6  # pairs of runs with short requests: when one comes within a step is chance
SLOW_ROUNDS = 8
PROBE_AFTER_S, PROBE_EVERY_S = 1.0, 0.2
_NOUNS = "cat dog ship tree house king river stone bird star book lamp road field cloud train"
PROMPTS = [f"Write a story about a {noun}." for noun in _NOUNS.split()]


def body(prompt: str, tokens: int, salt: str, **more: Any) -> dict[str, Any]:
    """A request that is streamed, never ends early, and says at its end how many tokens it had."""
    fixed: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True}
    fixed["stream_options"] = {"include_usage": True}
    return {"prompt": prompt, "max_tokens": tokens, "cache_salt": salt, **fixed, **more}


class Engine:
    """The engine under an LLM, without text: ids in, ids out."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._count = 0
        self._ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]

    def _submit(self, ids: Sequence[Sequence[int]], tokens: int, salt: str) -> SimpleQueue[Any]:
        """Queue requests; their outputs come into the queue, each with its time."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        requests = []
        for prompt in ids:
            self._count += 1
            key = f"bench-{self._count}"
            requests.append(Request(id=key, prompt_ids=prompt, params=params, scope=salt))
        box: SimpleQueue[Any] = SimpleQueue()
        self._llm._loop.submit(requests, lambda out: box.put((time.perf_counter(), out)))  # noqa: SLF001
        return box

    def throughput(self, tokens: int, salt: str) -> float:
        """Tokens per second of all streams together."""
        start = time.perf_counter()
        box, left = self._submit(self._ids, tokens, salt), STREAMS
        while left:
            end, out = box.get()
            left -= _is_last(out)
        return STREAMS * tokens / (end - start)

    def first_tokens(self, salt: str) -> list[float]:
        """Seconds to the only token of short requests, beside streams that run."""
        box, found, ended = self._submit(self._ids, TOKENS, salt), [], 0
        time.sleep(PROBE_AFTER_S)
        while not ended:
            start = time.perf_counter()
            probe = self._submit(self._ids[:1], 1, f"{salt}-{len(found)}")
            end, _ = probe.get()
            while not box.empty():
                ended += _is_last(box.get()[1])
            if not ended:
                found.append(end - start)
            time.sleep(PROBE_EVERY_S)
        while ended < STREAMS:
            ended += _is_last(box.get()[1])
        return found


def _is_last(out: StepOutput) -> bool:
    assert isinstance(out, StepOutput), out
    return out.finish_reason is not None


def load(clients: Clients, port: int, bodies: Sequence[dict[str, Any]], **probes: Any) -> Any:
    """Send requests at once; what the clients noted, once every answer has proved to be whole."""
    seen = clients("load", port=port, bodies=bodies, **probes)
    asked = [(b, s) for b, s in zip(bodies, seen["streams"], strict=True)]
    asked += [(probes["probe"], s) for s in seen["probes"]]
    for request, noted in asked:
        whole = noted["status"] == 200 and noted["num_tokens"] == request["max_tokens"]
        assert whole, f"{request} was answered with {noted}"
    return seen


def over_http(clients: Clients, port: int, tokens: int, salt: str) -> tuple[float, Any]:
    """Tokens per second of all streams together, and what the clients noted."""
    seen = load(clients, port, [body(p, tokens, salt) for p in PROMPTS])
    start, end = min(s["sent"] for s in seen["streams"]), max(s["end"] for s in seen["streams"])
    return STREAMS * tokens / (end - start), seen


@dataclass(frozen=True, slots=True)
class Http:
    """A server over the engine, and who asks it."""

    spec: str
    local: Local
    stages: Switched
    clients: Clients
    tokens: int  # of an answer


def throughput(engine: Engine, http: Http) -> Row:
    """What the HTTP layer takes of the engine's own throughput, in pairs that take turns."""
    local = http.local
    own, over, cpu, client = [], [], [], []
    for i in range(-1, ROUNDS):  # the first warms up
        order: list[Callable[[], object]] = []
        salt = f"{http.spec}-{i}"

        def alone(salt: str = salt) -> None:
            own.append(engine.throughput(http.tokens, f"{salt}-engine"))

        def served(salt: str = salt) -> None:
            before = local.cpu_seconds()
            with http.stages.counting():
                speed, seen = over_http(http.clients, local.port, http.tokens, f"{salt}-http")
            over.append(speed)
            num_tokens = STREAMS * http.tokens
            cpu.append((local.cpu_seconds() - before) / num_tokens)
            client.append(seen["client_cpu_s"] / num_tokens)

        order = [alone, served] if i % 2 else [served, alone]
        for part in order:
            part()
    losses = [1 - h / o for h, o in zip(over[1:], own[1:], strict=True)]
    return row(
        f"http_cost_{http.spec}",
        statistics.median(losses),
        "of throughput",
        0.08,
        baseline={
            "quartiles": [round(q, 4) for q in statistics.quantiles(losses, n=4)],
            "engine_tokens_per_second": [round(v, 1) for v in own[1:]],
            "http_tokens_per_second": [round(v, 1) for v in over[1:]],
            "server_cpu_us_per_token": round(statistics.median(cpu[1:]) * 1e6, 1),
            "clients_cpu_us_per_token": round(statistics.median(client[1:]) * 1e6, 1),
        },
        low=True,
    )


def first_token(engine: Engine, http: Http) -> Row:
    """Time to the token of a 1-token request beside 16 streams, over HTTP against the engine's."""
    own: list[float] = []
    over: list[float] = []
    for i in range(FIRSTS):
        salt = f"first-{http.spec}-{i}"
        own += engine.first_tokens(f"{salt}-engine")
        with http.stages.counting():
            seen = load(
                http.clients,
                http.local.port,
                [body(p, TOKENS, f"{salt}-http") for p in PROMPTS],
                probe=body(PROMPTS[0], 1, f"{salt}-probe"),
                probe_after_s=PROBE_AFTER_S,
                probe_every_s=PROBE_EVERY_S,
            )
        over += [p["first_s"] for p in seen["probes"]]
    return row(
        f"first_token_{http.spec}",
        statistics.median(over) / statistics.median(own),
        "x the engine's",
        1.3,
        baseline={
            "engine_ms": _quartiles(own),
            "http_ms": _quartiles(over),
            "probes": [len(own), len(over)],
        },
        low=True,
    )


def _quartiles(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * q, 2) for q in statistics.quantiles(seconds, n=4)]


def memory(clients: Clients, folder: Path) -> Row:
    """What 1,000 idle connections and 200 requests that wait add to a server with 16 streams."""
    with process(folder, "--max-rows", str(STREAMS)) as (pid, port):
        load(clients, port, [body(p, TOKENS, "warm") for p in PROMPTS])
        running = [body(p, ENDLESS, "run") for p in PROMPTS]
        clients("hold", port=port, idle=0, bodies=running)
        time.sleep(5)
        before = resident_memory(pid) / 1e6
        waiting = [body(PROMPTS[i % STREAMS], TOKENS, f"wait-{i}") for i in range(200)]
        clients("hold", port=port, idle=1000, bodies=waiting)
        time.sleep(2)
        after = resident_memory(pid) / 1e6
        open_now = server_load(port)
        assert open_now == STREAMS + len(waiting), f"{open_now} requests are open"
        clients("release")
    return row(
        "idle_and_queued_memory",
        after - before,
        "MB",
        150,
        baseline={"before_mb": round(before, 1), "after_mb": round(after, 1)},
        low=True,
    )


def slow_reader(clients: Clients, folder: Path) -> Row:
    """Throughput of 15 streams beside one that is read a byte a second, over that beside a normal one."""
    rest = PROMPTS[1:]
    ratios = []
    with process(folder, "--max-rows", str(STREAMS)) as (_, port):
        for i in range(-1, SLOW_ROUNDS):
            found = {}
            for way in ("load", "sip") if i % 2 else ("sip", "load"):
                salt = f"slow-{i}-{way}"
                wide = [body(PROMPTS[0], TOKENS, salt, logprobs=5)]
                bodies = [body(p, TOKENS, salt) for p in rest]
                if way == "sip":
                    clients("sip", port=port, bodies=wide)
                seen = load(clients, port, bodies + (wide if way == "load" else []))
                clients("release")
                readers = seen["streams"][: len(rest)]
                start, end = min(s["sent"] for s in readers), max(s["end"] for s in readers)
                found[way] = len(rest) * TOKENS / (end - start)
            ratios.append((found["sip"], found["load"]))
    return row(
        "beside_a_slow_reader",
        statistics.median(slow / normal for slow, normal in ratios[1:]),
        "x beside a normal",
        0.95,
        baseline={"tokens_per_second": [[round(v, 1) for v in pair] for pair in ratios[1:]]},
        low=False,
    )


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "serve-cpu.json")
    parser.add_argument("--only", nargs="*", help="speed, memory or slow; default: all")
    parser.add_argument("--spec", nargs="*", default=["auto", "none"], help="drafters")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of answers whose cost is measured"
    )
    args = parser.parse_args()
    wanted = args.only or ["speed", "memory", "slow"]
    started = time.time()
    rows: list[Row] = []
    clients, stages = Clients(), Switched()
    try:
        for spec in args.spec if "speed" in wanted else ():
            # Rows for probes beside those of the streams; the rest is as `paceline serve` has it.
            with (
                LLM(spec=spec, max_rows=STREAMS + 4, seed=0, stages=stages) as llm,
                only_new_garbage(),
                quick_turns(),
            ):
                http = Http(spec, Local(llm, stages), stages, clients, args.tokens)
                rows += [measure(Engine(llm), http) for measure in (throughput, first_token)]
                http.local.close()
        with tempfile.TemporaryDirectory() as folder:
            if "memory" in wanted:
                rows.append(memory(clients, Path(folder)))
            if "slow" in wanted:
                rows.append(slow_reader(clients, Path(folder)))
    finally:
        clients.close()
    record = {
        "schema": "paceline/serve-cpu/1",
        "model": "SmolLM2-135M-Instruct",
        "streams": STREAMS,
        "tokens": args.tokens,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "source": source(),
        "minutes": round((time.time() - started) / 60, 1),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
