"""Flags that only the real process puts together: metrics under other names, stages' times, the access log, TLS."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.e2e.server.conftest import FLAGS
from tests.local_server import PATH, body, wait_for
from tests.server_process import running

LIMIT_S = 120.0  # nothing here takes a tenth of it


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody else has signed, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    file, key = folder / "certificate.pem", folder / "key.pem"
    asked = (
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    )
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    words = [program, *asked, *names, "-out", str(file), "-keyout", str(key)]
    subprocess.run(words, check=True, capture_output=True)
    return file, key


def test_metrics_have_vllm_s_names_too_and_stages_are_timed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """What the flags promise is on the wire, with what was really done."""
    given = ("--spec", "suffix", "--no-adaptive", "--vllm-metrics", *FLAGS)
    with (
        running(tiny_model, tmp_path, *given) as server,
        httpx2.Client(base_url=server.url, timeout=LIMIT_S) as client,
    ):

        def figures(name: str) -> dict[str, float]:
            """Of every stage; the key is "" where there are none."""
            found = re.findall(
                rf"^{name}{{(.*)}} (\S+)$", client.get("/metrics").text, re.MULTILINE
            )
            stages = [(re.search(r'stage="(\w+)"', labels), value) for labels, value in found]
            return {"" if m is None else m[1]: float(value) for m, value in stages}

        made = {**body(max_tokens=20, ignore_eos=True), "temperature": 0}
        assert client.post(PATH, json=made).status_code == 200
        # Counts are taken once a step is over, which may be after its answer has gone out.
        wait_for(lambda: figures("vllm:generation_tokens_total") == {"": 20.0}, LIMIT_S)
        assert figures("paceline:generation_tokens_total") == {"": 20.0}
        assert figures("vllm:spec_decode_num_drafts_total")[""] >= 1
        stages = ("prefill", "verify", "walk")
        wait_for(
            lambda: all(figures("paceline:step_stage_seconds_count").get(s, 0) > 0 for s in stages),
            LIMIT_S,
        )


def test_tls_and_a_log_line_per_request(
    tiny_model: Path, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """Whoever trusts the certificate is served, and logged; without TLS nobody is."""
    file, key = certificate
    given = ("--ssl-certfile", str(file), "--ssl-keyfile", str(key), "--access-log")
    with running(tiny_model, tmp_path, "--spec", "none", *given, *FLAGS) as server:
        url = f"https://127.0.0.1:{server.port}"
        trusting = ssl.create_default_context(cafile=str(file))
        with httpx2.Client(base_url=url, timeout=LIMIT_S, verify=trusting) as client:
            found = client.post(f"{PATH}?a=b", json=body())
            assert found.status_code == 200
            assert found.json()["usage"]["completion_tokens"] > 0
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{url}/health", timeout=LIMIT_S)  # signed by nobody who is known
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{server.url}/health", timeout=LIMIT_S)
        line = f'"POST {PATH}?a=b HTTP/1.1" 200'
        wait_for(lambda: line in server.log.read_text(encoding="utf-8"), LIMIT_S)
        assert url in server.log.read_text(encoding="utf-8")
