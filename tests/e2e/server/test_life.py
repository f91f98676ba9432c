"""A real server and a tiny model: whoever leaves, waits, dawdles or asks too much troubles nobody else."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from paceline.core.device import resident_memory
from tests.local_server import PATH, answer_on, begun, body, post, wait_for
from tests.server_process import LIMIT_S, ServerProcess, running

ENDLESS = {"max_tokens": 60_000, "ignore_eos": True}  # minutes


def admitted(server: ServerProcess, **fields: Any) -> socket.socket:
    """A stream that was let in."""
    connection = server.connected()
    connection.sendall(post(body(**{**ENDLESS, **fields}, stream=True)))
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def figure(text: str, name: str) -> float:
    return float(re.search(rf"^paceline:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])


def nothing_runs(client: httpx2.Client) -> bool:
    """What the engine itself says: no request, and no page that is held."""
    text = client.get("/metrics").text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(figure(text, name) for name in names)


def texts(server: ServerProcess) -> list[str]:
    """Some answers, asked for at the same time, each with a seed of its own."""
    bodies = [body(max_tokens=40, ignore_eos=True, seed=i, n=1) for i in range(3)]
    with (
        httpx2.Client(base_url=server.url, timeout=LIMIT_S) as client,
        ThreadPoolExecutor() as pool,
    ):
        answers = list(pool.map(lambda fields: client.post(PATH, json=fields).json(), bodies))
    assert all(answer["usage"]["completion_tokens"] == 40 for answer in answers)
    return [answer["choices"][0]["text"] for answer in answers]


def test_clients_that_leave_free_rows_and_pages(endless: ServerProcess) -> None:
    """Streams, whole answers and what still waits: none goes on, though each would for minutes."""
    with httpx2.Client(base_url=endless.url, timeout=LIMIT_S) as client:
        for _ in range(2):
            streams = [begun(endless.connected(), **ENDLESS, n=2) for _ in range(2)]
            whole = [endless.connected() for _ in range(2)]
            for connection in whole:
                connection.sendall(post(body(**ENDLESS)))
            wait_for(lambda: client.get("/load").json()["num_requests_running"] == 6, LIMIT_S)
            assert client.post(PATH, json=body()).status_code == 200
            full = [admitted(endless, n=2) for _ in range(2)]
            wait_for(lambda: client.get("/load").json()["server_load"] == 10, LIMIT_S)
            for connection in (*streams, *whole, *full):
                connection.close()
            wait_for(lambda: client.get("/load").json()["server_load"] == 0, LIMIT_S)
        wait_for(lambda: nothing_runs(client), LIMIT_S)


def test_a_client_that_reads_a_byte_a_second_troubles_nobody(endless: ServerProcess) -> None:
    """Others get the same tokens, and get them whole, while it has hardly seen the beginning of its own."""
    alone = texts(endless)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(LIMIT_S)
        slow.connect(("127.0.0.1", endless.port))
        slow.sendall(post(body(**ENDLESS, stream=True, logprobs=20, n=4)))
        read = b""
        for _ in range(3):
            read += slow.recv(1)
            assert texts(endless) == alone
            time.sleep(1)
        assert read == b"HTT"
        with httpx2.Client(base_url=endless.url, timeout=LIMIT_S) as client:
            wait_for(
                lambda: client.get("/load").json()["server_load"] == 4, LIMIT_S
            )  # it is still served
    with httpx2.Client(base_url=endless.url, timeout=LIMIT_S) as client:
        wait_for(lambda: nothing_runs(client), LIMIT_S)


def test_a_thousand_idle_connections_trouble_nobody(endless: ServerProcess) -> None:
    """With 200 more answers that wait: little memory, the same tokens, and nothing is left of them."""
    alone = texts(endless)
    before = resident_memory(endless.process.pid)
    kept = []
    for _ in range(1000):
        kept.append(endless.connected())
        kept[-1].sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer_on(kept[-1])[0] == 200
    assert texts(endless) == alone
    for connection in kept[:208]:  # 8 of them run
        connection.sendall(post(body(**ENDLESS, stream=True)))
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    grown = resident_memory(endless.process.pid) - before
    with httpx2.Client(base_url=endless.url, timeout=LIMIT_S) as client:
        wait_for(lambda: client.get("/load").json()["num_requests_running"] == 8, LIMIT_S)
        assert client.get("/load").json()["num_requests_waiting"] == 200
        for connection in kept:
            connection.close()
        wait_for(lambda: nothing_runs(client), LIMIT_S)
        assert client.get("/load").json()["server_load"] == 0
    assert texts(endless) == alone
    assert grown < 150e6, f"{grown / 1e6:.0f} MB"


def test_a_server_with_all_its_limits(long_model: Path, tmp_path: Path) -> None:
    """Key, queue, body, drain: through the command line, a file and the environment, to exit code 0."""
    file = tmp_path / "serve.yaml"
    file.write_text("max-queued-requests: 1\nmax-body-bytes: 5000\nserved-model-name: small\n")
    flags = (
        "--config",
        str(file),
        "--max-rows",
        "1",
        "--api-key",
        "hush",
        "--drain-timeout",
        "0.5",
    )
    headers = {"authorization": "Bearer hush"}
    environment = {"PACELINE_SERVE_SPEC": "suffix"}
    with running(long_model, tmp_path, *flags, **environment) as server:
        with httpx2.Client(base_url=server.url, timeout=LIMIT_S, headers=headers) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "small"
            assert client.post(PATH, json=body(user="x" * 6000)).status_code == 413
            assert httpx2.get(f"{server.url}/v1/models").status_code == 401
            assert httpx2.get(f"{server.url}/health").status_code == 200
            for _ in range(2):  # one has the row, one waits
                stream = server.connected()
                stream.sendall(post(body(**ENDLESS, stream=True), authorization="Bearer hush"))
                assert stream.recv(15) == b"HTTP/1.1 200 OK"
            refused = client.post(PATH, json=body(max_tokens=1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
            assert int(refused.headers["retry-after"]) >= 1
        server.send_signal()
        code, log = server.ended()
    assert code == 0, log
    (line,) = [line for line in log.splitlines() if "differs from the defaults" in line]
    told = json.loads(line[line.index("{") :])
    assert told["max_queued_requests"] == 1
    assert told["served_model_name"] == ["small"]
    assert told["spec"] == "suffix"
    assert "hush" not in log
