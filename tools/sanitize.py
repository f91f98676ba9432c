"""Runs every Triton kernel under NVIDIA's compute-sanitizer: accesses out of bounds, and races.

    python tools/sanitize.py

Each part of tests/gpu/test_small_launches.py runs twice, in processes of its own: under memcheck, with
PyTorch's caching allocator off (it hands out parts of large blocks, and an access beyond a tensor hits its
neighbour), and under racecheck (shared memory). Beforehand a kernel that reads what is not its own must be
found, or else nothing that follows would mean anything.

Prints a line a run: what, errors, seconds. Exits with 1 if anything was found, failed, was skipped or did
not end in time; what was printed by a run that did is shown. Several runs share the GPU; a kernel's
compilation is the CPU's and as fast as ever.

Needs a GPU, and compute-sanitizer of the CUDA toolkit: on the PATH, under CUDA_HOME or /usr/local/cuda.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of tests/small_launches.py.
PARTS = (
    *("attention", "bookkeeping", "drafts", "between_products", "products", "picks"),
    *("invariant",),
)
CONTROL = "control"
TOOLS = {
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "racecheck": {},
}
# How a tool ends what it says: "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 1 hazard displayed (1 error, ...".
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
SHOWN = 4_000  # characters of what a failed run printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    tool: str
    part: str
    errors: int | None  # by the tool; None: it did not say
    code: int | None  # of the process; None: it was stopped
    seconds: float
    text: str

    @property
    def verdict(self) -> str:
        """One word or a few."""
        if self.code is None:
            return "not done in time"
        if self.errors is None:
            return "no summary"
        if self.errors:
            return f"{self.errors} errors"
        if self.code == 0 and self.part != CONTROL and not self.passed:
            return "0 errors, and no test ran"
        return "0 errors" if self.code == 0 else "0 errors, and the test failed"

    @property
    def passed(self) -> bool:
        """Whether a test ran to its end: without a GPU all are skipped, and a tool finds nothing."""
        return re.search(r"\b[1-9]\d* passed\b", self.text) is not None

    @property
    def good(self) -> bool:
        """Whether all is as it should be: the control's error has to be found."""
        if self.part == CONTROL:
            return bool(self.errors)
        return self.errors == 0 and self.code == 0 and self.passed

    @property
    def line(self) -> str:
        """For people and for `grep`."""
        mark = "ok" if self.good else "BAD"
        return f"{mark:4} {self.tool:10} {self.part:18} {self.verdict:32} {self.seconds:6.1f} s"


def find() -> str | None:
    """Where compute-sanitizer is."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [str(Path(home, "bin")) for home in homes if home]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def errors_in(text: str) -> int | None:
    """The number in a tool's last words; None: there are none."""
    found = [next(n for n in match.groups() if n) for match in SUMMARY.finditer(text)]
    return int(found[-1]) if found else None


def run(sanitizer: str, tool: str, part: str, limit: float) -> Outcome:
    """Run one part under one tool."""
    test = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--no-header"]
    target = [*test, f"tests/gpu/test_small_launches.py::test_small_launches[{part}]"]
    if part == CONTROL:
        target = ["-m", "tests.out_of_bounds"]
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    env = {**os.environ, **TOOLS[tool], "OMP_NUM_THREADS": "2"}
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sanitizer, *options, sys.executable, *target],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None
    try:
        text, _ = process.communicate(timeout=max(limit, 0.1))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the tool and the program under it, both started above
        text, _ = process.communicate()
        code = None
    return Outcome(
        tool=tool,
        part=part,
        errors=errors_in(text),
        code=code,
        seconds=time.perf_counter() - began,
        text=text,
    )


def report(outcome: Outcome) -> bool:
    """Print a run's line, and what it said if it is not good."""
    print(outcome.line, flush=True)
    if not outcome.good:
        print(outcome.text[-SHOWN:], flush=True)
    return outcome.good


def main() -> int:
    """Run all, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="parts of tests/small_launches.py; default: all")
    parser.add_argument("--tool", choices=list(TOOLS), action="append", help="default: both")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a run")
    parser.add_argument("--whole", type=float, default=195, help="seconds of all")
    args = parser.parse_args()
    sanitizer = find()
    if sanitizer is None:
        print(
            "compute-sanitizer was asked for and is not on the PATH, under CUDA_HOME or /usr/local/cuda; "
            "it comes with the CUDA toolkit. Install that, or name its folder in CUDA_HOME."
        )
        return 2
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        print(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}. Name these.")
        return 2
    if args.jobs < 1:
        print(
            f"--jobs {args.jobs} runs at a time were asked for; 1 or more are possible. Give these."
        )
        return 2
    end = time.perf_counter() + args.whole
    tools = args.tool or list(TOOLS)
    asked = [(tool, part) for part in args.parts or PARTS for tool in tools]
    if "memcheck" in tools:
        asked.insert(0, ("memcheck", CONTROL))

    def one(what: tuple[str, str]) -> bool:
        left = min(args.limit, end - time.perf_counter())
        return report(run(sanitizer, *what, left))

    with ThreadPoolExecutor(args.jobs) as pool:
        good = list(pool.map(one, asked))
    print(f"{sum(good)} of {len(good)} runs are as they should be")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
