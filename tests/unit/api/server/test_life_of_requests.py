"""What a request may meet on its way: a full queue, a wrong key, a client that leaves, an engine that dies."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence

import httpx2
import pytest

from paceline.api import answers
from paceline.api.llm import LLM
from paceline.api.results import Chunk
from paceline.api.server.settings import ServerSettings
from paceline.core.request import SamplingParams
from tests.fake_engine import FakeEngine
from tests.local_server import (
    ENDLESS,
    PATH,
    TIMEOUT,
    LocalServer,
    answer_on,
    begun,
    body,
    local_server,
    post,
    slowly,
    until,
    wait_for,
)
from tests.served import TOKENIZER, ids


@pytest.fixture
def endless():
    """Answers go on until somebody ends them."""
    with local_server(max_len=10**6, on_step=slowly) as server:
        yield server


# -- clients that leave ---------------------------------------------------------------------------


def test_a_stream_that_is_left_ends_in_the_engine(endless: LocalServer) -> None:
    """A client that closes its connection in the middle of a stream frees its row, once."""
    connection = begun(endless.raw())
    assert len(endless.engine._open) == 1
    connection.close()
    endless.settle()
    assert endless.engine.aborted == [endless.engine.added[0].id]
    assert endless.service.load()["server_load"] == 0


def test_a_whole_answer_that_nobody_waits_for_ends_in_the_engine(endless: LocalServer) -> None:
    """The same for an answer that would come as a whole."""
    connection = endless.raw()
    connection.sendall(post(body(max_tokens=ENDLESS)))
    wait_for(lambda: endless.engine._open)
    connection.close()
    endless.settle()
    assert endless.engine.aborted == [endless.engine.added[0].id]


def test_who_closes_the_sending_side_has_left(endless: LocalServer) -> None:
    """TCP tells it no differently, and an answer for nobody would be made to its end."""
    connection = endless.raw()
    connection.sendall(post(body(max_tokens=ENDLESS)))
    wait_for(lambda: endless.engine._open)
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""
    endless.settle()
    assert endless.engine.aborted == [endless.engine.added[0].id]
    connection.close()


def test_all_samples_of_all_prompts_end_with_their_client(endless: LocalServer) -> None:
    """N samples of several prompts are one client's."""
    connection = begun(endless.raw(), prompt=["the end", "of"], n=3)
    wait_for(lambda: len(endless.engine._open) == 6)
    connection.close()
    endless.settle()
    assert sorted(endless.engine.aborted) == sorted(r.id for r in endless.engine.added)


def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    """Whoever waits and leaves is no longer counted."""
    settings = ServerSettings(max_queued_requests=1)
    with local_server(max_len=10**6, on_step=slowly, max_rows=1, settings=settings) as server:
        first, second = begun(server.raw()), begun(server.raw())
        with server.client() as client:
            assert client.post(PATH, json=body()).status_code == 503
            second.close()
            wait_for(lambda: server.service.admission.num_open == 1)
            third = begun(server.raw())
        first.close()
        third.close()
        server.settle()


# -- room -----------------------------------------------------------------------------------------


def test_a_full_queue_is_told_with_a_time_to_come_back() -> None:
    """Beyond rows and queue there is 503 with Retry-After, in OpenAI's form; it is counted."""
    settings = ServerSettings(max_queued_requests=2)
    with local_server(max_len=10**6, on_step=slowly, max_rows=2, settings=settings) as server:
        open_ones = [begun(server.raw()) for _ in range(4)]
        with server.client() as client:
            load = client.get("/load").json()
            assert (load["num_requests_running"], load["num_requests_waiting"]) == (2, 2)
            refused = client.post(PATH, json=body())
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert "2 answers wait already, and 2 may" in refused.json()["error"]["message"]
            text = client.get("/metrics").text
            assert (
                'admission_rejections_total{engine="0",model_name="tiny",reason="queue_full"} 1'
                in text
            )
            open_ones.pop().close()
            wait_for(lambda: server.service.admission.num_open == 3)
            assert client.post(PATH, json=body()).status_code == 200
        for one in open_ones:
            one.close()
        server.settle()


def test_more_than_ever_fits_is_a_mistake_not_a_wait() -> None:
    """A request with more answers than rows and queue hold would come back for ever."""
    settings = ServerSettings(max_queued_requests=2)
    with local_server(max_rows=2, settings=settings) as server, server.client() as client:
        refused = client.post(PATH, json=body(n=5))
        assert refused.status_code == 400
        assert "5 answers were asked for" in refused.json()["error"]["message"]
        assert client.post(PATH, json=body(n=4)).status_code == 200


def test_waiting_prompt_tokens_have_a_limit_too() -> None:
    """Long prompts fill the queue sooner; one alone is always let in."""
    settings = ServerSettings(max_queued_tokens=10)
    with local_server(settings=settings) as server:
        server.gate.close()
        waiting = server.raw()
        waiting.sendall(post(body(prompt=[5] * 40)))
        wait_for(lambda: server.service.admission.queued_tokens == 40)
        with server.client() as client:
            refused = client.post(PATH, json=body())
            assert refused.status_code == 503
            assert "40 prompt tokens wait" in refused.json()["error"]["message"]
            server.gate.open()
            assert answer_on(waiting)[0] == 200
            assert client.post(PATH, json=body()).status_code == 200
        waiting.close()
        server.settle()
        assert server.service.admission.queued_tokens == 0


# -- the engine -----------------------------------------------------------------------------------


def test_an_engine_that_dies_is_told_to_all_and_turns_health_red() -> None:
    """Streams end with an error, whole answers with 500, /health with 503; nothing hangs."""
    dies = threading.Event()

    def step(number: int) -> None:
        slowly(number)
        if dies.is_set():
            msg = "the machine is on fire"
            raise RuntimeError(msg)

    with local_server(max_len=10**6, on_step=step) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        stream = begun(server.raw())
        whole = server.raw()
        whole.sendall(post(body(max_tokens=ENDLESS)))
        wait_for(lambda: server.service.admission.num_open == 2)
        dies.set()
        status, told = answer_on(whole)
        assert status == 500
        assert told["error"]["code"] == "engine_stopped"
        assert b"the machine is on fire" in until(stream, b"[DONE]")
        health = client.get("/health")
        assert health.status_code == 503
        assert "on fire" in health.json()["error"]["message"]
        assert client.get("/ready").status_code == 503
        assert client.post(PATH, json=body()).status_code == 500
        assert client.get("/metrics").status_code == 200
        stream.close()
        whole.close()
        wait_for(lambda: server.service.admission.num_open == 0)


def test_a_step_that_hangs_turns_health_red() -> None:
    """The watchdog looks at work that makes no progress, never at an idle engine."""
    settings = ServerSettings(watchdog_timeout=1.0)
    with local_server(settings=settings) as server:
        server.gate.close()
        with server.client() as client:
            assert client.get("/health").status_code == 200
            connection = server.raw()
            connection.sendall(post(body()))
            wait_for(lambda: client.get("/health").status_code == 503)
            told = client.get("/health").json()["error"]["message"]
            for part in ("has not ended", "1 s are expected at most", "--watchdog-timeout"):
                assert part in told
            server.gate.open()
            assert answer_on(connection)[0] == 200
            wait_for(lambda: client.get("/health").status_code == 200)
        connection.close()


# -- the end --------------------------------------------------------------------------------------


def test_draining_lets_answers_end_and_takes_no_new_ones(endless: LocalServer) -> None:
    """From the first signal on: /ready and new requests 503, open ones go on, then are ended."""
    stream = begun(endless.raw())
    draining = asyncio.run_coroutine_threadsafe(endless.service.drain(0.5), endless.events)
    wait_for(lambda: endless.service.draining)
    with endless.client() as client:
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert "takes no more requests; ask another" in ready.json()["error"]["message"]
        assert client.get("/health").status_code == 200
        refused = client.post(PATH, json=body())
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
    data = until(stream, b"[DONE]")
    assert b"the server ended this answer" in data
    assert b'"code":503' in data
    assert draining.result(TIMEOUT) is False
    stream.close()
    endless.settle()


def test_draining_ends_at_once_where_nothing_runs(endless: LocalServer) -> None:
    """An idle server has nothing to wait for."""
    draining = asyncio.run_coroutine_threadsafe(endless.service.drain(10 * TIMEOUT), endless.events)
    assert draining.result(TIMEOUT) is True


# -- streams --------------------------------------------------------------------------------------


def test_a_silent_stream_gets_comments() -> None:
    """While a request waits for a row its stream is open, and proxies see life."""
    settings = ServerSettings(sse_keep_alive_interval=0.05)
    with local_server(settings=settings) as server:
        server.gate.close()
        connection = server.raw()
        connection.sendall(post(body(stream=True)))
        data = b"".join(until(connection, b": keep-alive\n\n") for _ in range(3))
        assert data.startswith(b"HTTP/1.1 200")
        assert b"data:" not in data
        server.gate.open()
        assert b"data:" in until(connection, b"[DONE]")
        connection.close()


def test_a_client_that_takes_nothing_slows_nobody_and_is_given_up() -> None:
    """The engine goes on at its pace, memory stays bounded, and after a time the connection is cut."""
    settings = ServerSettings(write_timeout=1.0)
    small = {"on_step": slowly, "send_buffer": 2**16}
    with local_server(max_len=10**6, settings=settings, **small) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        fields = body(prompt=["a"] * 8, n=4, max_tokens=ENDLESS, stream=True, logprobs=5)
        slow.sendall(post(fields))
        wait_for(lambda: len(server.engine.added) == 32)
        with server.client() as client:
            for _ in range(5):
                assert client.post(PATH, json=body(max_tokens=30)).status_code == 200
        server.settle()  # given up without our doing
        slow.close()


def test_what_a_slow_reader_has_not_taken_is_joined() -> None:
    """Chunks that pile up are few, however many steps made them; the text is whole."""
    llm = LLM.from_engine(FakeEngine(ids("abcdefghij"), max_len=10**5, width=1), TOKENIZER)

    async def main() -> None:
        found = await llm.submit([ids("x")], SamplingParams(max_tokens=2000, logprobs=1))
        first = await anext(found)
        while llm._loop.call(lambda engine: engine.has_work).result():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(found._inbox._chunks) <= 65
        rest = [chunk async for chunk in found]
        assert len(rest) == 1
        assert first.text + rest[0].text == "abcdefghij" * 200
        assert len(rest[0].token_ids) == len(rest[0].sources) == len(rest[0].logprobs)
        assert rest[0].result.text == first.text + rest[0].text

    try:
        asyncio.run(main())
    finally:
        llm.close()


def test_what_many_answers_pile_up_is_joined_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each joining goes through all of them, so it comes once in as many chunks as there are answers."""
    joinings: list[int] = []
    join = answers._by_answer

    def counted(chunks: Sequence[Chunk]) -> list[Chunk]:
        joinings.append(len(chunks))
        return join(chunks)

    monkeypatch.setattr(answers, "_by_answer", counted)
    inbox, num_answers, num_steps = answers.Inbox(), 128, 20
    for step in range(num_steps):
        for index in range(num_answers):
            inbox.put(
                Chunk(
                    prompt_index=0,
                    sample_index=index,
                    text=f"{step} ",
                    token_ids=(step,),
                    sources=(0,),
                    logprobs=None,
                )
            )
    assert len(joinings) <= num_steps + 2
    taken = inbox.take()
    assert [chunk.sample_index for chunk in taken] == list(range(num_answers))
    assert {chunk.token_ids for chunk in taken} == {tuple(range(num_steps))}


def test_streams_of_many_prompts_say_which(endless: LocalServer) -> None:
    """Chunks of several prompts come mixed, each with its index."""
    with (
        endless.client() as client,
        client.stream("POST", PATH, json=body(prompt=["a", "b", "c"], n=2, stream=True)) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    seen = {choice["index"] for line in lines for choice in json.loads(line[6:])["choices"]}
    assert seen == set(range(6))


def test_the_official_kinds_of_connection_are_kept(endless: LocalServer) -> None:
    """A connection serves request after request, streams included."""
    with endless.client(limits=httpx2.Limits(max_connections=1)) as client:
        for i in range(5):
            assert client.post(PATH, json=body(stream=bool(i % 2))).status_code == 200
