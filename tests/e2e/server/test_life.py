"""A real server and a tiny model: whoever leaves, waits or asks too much leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path

import httpx2

from tests.local_server import PATH, answer_on, body, post, wait_for
from tests.server_process import ServerProcess, running


def connected(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30)


def begun(server: ServerProcess, **fields) -> socket.socket:
    connection = connected(server)
    connection.sendall(post(body(max_tokens=900, ignore_eos=True, stream=True, **fields)))
    while b"data: " not in connection.recv(65536):
        pass
    return connection


def figure(text: str, name: str) -> float:
    return float(re.search(rf"^paceline:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[1])


def test_clients_that_leave_free_rows_and_pages(server: ServerProcess) -> None:
    """The engine itself says that nothing runs and no page is held; others were served meanwhile."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        before = figure(client.get("/metrics").text, "generation_tokens_total")
        for _ in range(3):
            streams = [begun(server, n=2) for _ in range(3)]
            whole = connected(server)
            whole.sendall(post(body(max_tokens=900, ignore_eos=True)))
            assert client.post(PATH, json=body()).status_code == 200
            for connection in (*streams, whole):
                connection.close()

        def idle() -> bool:
            text = client.get("/metrics").text
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return not any(figure(text, name) for name in names)

        wait_for(idle, 30)
        after = figure(client.get("/metrics").text, "generation_tokens_total")
        assert after - before < 3 * 7 * 900  # they did not go on to their end
        assert client.get("/load").json()["server_load"] == 0


def test_a_server_with_all_its_limits(tiny_model: Path, tmp_path: Path) -> None:
    """Key, queue, body, drain: through the command line, a file and the environment, to exit code 0."""
    file = tmp_path / "serve.yaml"
    file.write_text("max-queued-requests: 1\nmax-body-bytes: 5000\nserved-model-name: small\n")
    flags = ("--config", str(file), "--max-rows", "1", "--api-key", "hush", "--spec", "suffix")
    headers = {"authorization": "Bearer hush"}
    with running(tiny_model, tmp_path, *flags, "--drain-timeout", "0.5") as server:
        with httpx2.Client(base_url=server.url, timeout=60, headers=headers) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "small"
            assert client.post(PATH, json=body(user="x" * 6000)).status_code == 413
            assert httpx2.get(f"{server.url}/v1/models").status_code == 401
            assert httpx2.get(f"{server.url}/health").status_code == 200
            # A tiny model is quick: the row is kept by an answer that takes a while.
            long = body(max_tokens=1000, ignore_eos=True, stream=True, n=1)
            streams = []
            for _ in range(2):
                streams.append(connected(server))
                streams[-1].sendall(post(long, authorization="Bearer hush"))
            seen = set()
            deadline = time.monotonic() + 20
            while 503 not in seen and time.monotonic() < deadline:
                with connected(server) as third:
                    third.sendall(post(body(max_tokens=1), authorization="Bearer hush"))
                    seen.add(answer_on(third)[0])
                for stream in streams:
                    stream.sendall(post(long, authorization="Bearer hush"))
            assert 503 in seen
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for stream in streams:
            stream.close()
        log = server.log.read_text()
    (line,) = [line for line in log.splitlines() if "differs from the defaults" in line]
    told = json.loads(line[line.index("{") :])
    assert told["max_queued_requests"] == 1
    assert told["served_model_name"] == ["small"]
    assert told["spec"] == "suffix"
    assert "hush" not in log
