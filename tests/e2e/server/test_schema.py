"""schemathesis asks what /openapi.json allows, and what it does not: there is no 500."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import httpx2

from tests.server_process import ROOT, ServerProcess


def asked(server: ServerProcess, mode: str) -> dict[str, dict[str, int]]:
    """Operation -> status -> how often, of a bounded number of requests, the same in every run."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.ask_schema", server.url, mode],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    failures = [f"{name}\n{one['failure']}" for name, one in report.items() if one["failure"]]
    assert not failures, "\n\n".join(failures)
    return {name: one["statuses"] for name, one in report.items()}


def operations(server: ServerProcess) -> dict[str, bool]:
    """All that /openapi.json tells of; whether there is anything in them that can be wrong."""
    paths = httpx2.get(f"{server.url}/openapi.json", timeout=60).json()["paths"]
    return {
        f"{method.upper()} {path}": "requestBody" in told
        or any(parameter["in"] == "query" for parameter in told.get("parameters", ()))
        for path, methods in paths.items()
        for method, told in methods.items()
    }


def test_what_the_schema_allows_is_answered(endless: ServerProcess) -> None:
    """Every operation has a good answer among its answers, and each is as its schema says."""
    found = asked(endless, "positive")
    assert set(found) == set(operations(endless))
    for name, statuses in found.items():
        assert statuses.get("200"), f"{name}: nothing good was asked, so little is shown"
        assert set(statuses) <= {"200", "400", "404"}, name


def test_what_the_schema_forbids_is_refused(server: ServerProcess) -> None:
    """Whatever is wrong with a request, it is the client's fault; a path alone cannot be wrong."""
    found = asked(server, "negative")
    assert set(found) == {name for name, can_be_wrong in operations(server).items() if can_be_wrong}
    for name, statuses in found.items():
        assert statuses.get("400"), name
        assert set(statuses) <= {"200", "400", "404"}, name
