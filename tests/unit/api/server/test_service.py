"""Service and its streams without HTTP: what is open is counted, and ends exactly once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.api.server.errors import DrainingError, QueueFullError
from paceline.api.server.job import Job
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import EngineStoppedError, RequestError
from paceline.core.request import SamplingParams
from tests.fake_engine import TIMEOUT, FakeEngine, Gate
from tests.local_server import slowly
from tests.served import TOKENIZER, ids

ENDLESS = SamplingParams(max_tokens=100_000)


def job(*prompts: str, params: SamplingParams = ENDLESS) -> Job:
    return Job(prompts=[ids(p) for p in prompts or ("the end",)], params=params)


async def until(condition: Callable[[], object]) -> None:
    """Let others go on until something is so."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # noqa: ASYNC110 (asked of tasks and threads)
            await asyncio.sleep(0.002)


class Heard:
    """A listener that writes down."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.firsts = 0
        self.ends: list[str] = []
        self.lefts: list[tuple[str, int]] = []  # why, tokens handed over

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def began(self, job: Job, prompt_index: int, num_tokens: int, seconds: float) -> None:
        assert seconds >= 0
        assert num_tokens > 0
        assert 0 <= prompt_index < len(job.prompts)
        self.firsts += 1

    def came(self, num_tokens: int, seconds: float) -> None:
        assert seconds >= 0
        assert num_tokens > 0

    def ended(self, result: Any, job: Job, seconds: float) -> None:
        self.ends.append(result.finish_reason)

    def left(self, job: Job, prompt_index: int, num_tokens: int, seconds: float, why: str) -> None:
        assert seconds >= 0
        assert 0 <= prompt_index < len(job.prompts)
        self.lefts.append((why, num_tokens))


class Setup:
    def __init__(self, max_rows: int = 16, **settings: Any) -> None:
        self.gate = Gate()
        self.engine = FakeEngine(ids("abcdefghij"), max_len=10**6, on_step=self._step)
        cache = replace(self.engine.config.cache, max_rows=max_rows)
        self.engine.config = replace(self.engine.config, cache=cache)
        self.llm = LLM.from_engine(self.engine, TOKENIZER)
        self.heard = Heard()
        self.settings = ServerSettings(**settings)

    def _step(self, number: int) -> None:
        self.gate(number)
        slowly(number)

    async def hold(self) -> None:
        """Return once a step waits, which it does until the gate is opened."""
        self.gate.close()
        await asyncio.to_thread(self.gate.wait_until_it_holds)

    def run(self, test: Callable[[Service], Awaitable[None]]) -> None:
        """Run a test over a service, and look whether anything is left."""

        async def main() -> None:
            service = Service(self.llm, self.settings, listener=self.heard)
            await asyncio.wait_for(test(service), TIMEOUT)
            self.gate.open()
            gc.collect()
            await until(lambda: not self.engine._open)
            assert service.admission.num_open == service.admission.queued_tokens == 0
            assert await service.drain(TIMEOUT)
            assert len(self.engine.aborted) == len(set(self.engine.aborted))

        try:
            asyncio.run(main())
        finally:
            self.gate.open()
            self.llm.close()


def test_a_stream_may_be_awaited_entered_or_just_read() -> None:
    """Three ways to the same chunks; what is whole is not aborted."""
    setup = Setup()
    short = job(params=SamplingParams(max_tokens=6))

    async def test(service: Service) -> None:
        texts = []
        stream = await service.run(short)
        assert service.load()["server_load"] == 1
        texts.append("".join([chunk.text async for chunk in stream]))
        async with service.run(short) as stream:
            texts.append("".join([chunk.text async for chunk in stream]))
        texts.append("".join([chunk.text async for chunk in service.run(short)]))
        assert texts == ["abcdef"] * 3

    setup.run(test)
    assert setup.engine.aborted == []
    assert setup.heard.firsts == 3
    assert setup.heard.ends == ["length"] * 3


@pytest.mark.parametrize("way", ["close", "aclosing", "context", "dropped", "cancelled"])
def test_whoever_leaves_ends_the_answers_once(way: str) -> None:
    """However a stream is left, its requests end in the engine."""
    setup = Setup()

    async def test(service: Service) -> None:
        asked = job("a", "b")
        match way:
            case "close":
                stream = await service.run(asked)
                await anext(stream)
                stream.close()
                stream.close()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            case "aclosing":
                async with aclosing(service.run(asked)) as stream:
                    await anext(stream)
            case "context":
                async with service.run(asked) as stream:
                    await anext(stream)
            case "dropped":
                stream = await service.run(asked)
                await anext(stream)
                del stream
                assert not setup.heard.lefts, "the collector may not tell: it might hold a lock"
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            case "cancelled":

                async def read() -> None:
                    async for _ in service.run(asked):
                        pass

                task = asyncio.create_task(read())
                await until(lambda: setup.heard.firsts == 2)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert service.admission.num_open == 0
        assert [why for why, _ in setup.heard.lefts] == ["abort"] * 2

    setup.run(test)
    assert len(setup.engine.aborted) == 2
    assert setup.heard.ends == []
    assert len(setup.heard.lefts) == 2


def test_answers_that_are_whole_are_not_left_as_well() -> None:
    """Of three, one has ended when its reader leaves; who has them all may leave before the end's mark."""
    setup = Setup()

    async def test(service: Service) -> None:
        async with service.run(job("a", "b", "c", params=SamplingParams(max_tokens=1))) as stream:
            async for _ in stream:
                if len(setup.heard.ends) == 3:
                    break
        assert setup.heard.lefts == []
        setup.gate.close()  # nothing comes as long as this is so
        async with service.run(job("a", params=SamplingParams(max_tokens=9))):
            pass
        assert setup.heard.lefts == [("abort", 0)]
        setup.gate.open()
        seen = 0
        async with service.run(job("a", "b", params=SamplingParams(max_tokens=100_000))) as stream:
            async for chunk in stream:
                seen += len(chunk.token_ids)
                if seen > 9:
                    break
        assert [why for why, _ in setup.heard.lefts[1:]] == ["abort"] * 2
        assert sum(count for _, count in setup.heard.lefts[1:]) == seen

    setup.run(test)
    assert setup.heard.ends == ["length"] * 3
    assert len(setup.heard.lefts) == 3


def test_what_is_aborted_and_then_left_ends_once() -> None:
    """The server ends the answers, and the client goes before their last chunks have come."""
    setup = Setup()

    async def test(service: Service) -> None:
        stream = await service.run(job("a", "b"))
        await anext(stream)
        service.abort_all()
        stream.close()
        other = await service.run(job("c"))
        service.abort_all()
        assert [chunk.finish_reason async for chunk in other][-1] == "abort"
        other.close()

    setup.run(test)
    assert (setup.heard.ends, len(setup.heard.lefts)) == (["abort"], 2)


def test_cancelled_while_the_engine_is_busy_nothing_stays() -> None:
    """A client that leaves before the engine has even seen its request."""
    setup = Setup()

    async def test(service: Service) -> None:
        first = await service.run(job())
        await anext(first)
        await setup.hold()
        task = asyncio.create_task(service.run(job())._enter())
        await until(lambda: service.admission.num_open == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert service.admission.num_open == 1
        setup.gate.open()
        first.close()

    setup.run(test)


def test_refusals_are_told_before_the_engine_is_asked() -> None:
    """Full, draining, and more than ever fits; each is counted but the last, which is a mistake."""
    setup = Setup(max_rows=1, max_queued_requests=1)

    async def test(service: Service) -> None:
        first, second = await service.run(job()), await service.run(job())
        with pytest.raises(QueueFullError, match="1 answers wait already") as full:
            await service.run(job())
        assert full.value.retry_after_s >= 1
        with pytest.raises(RequestError, match="3 answers were asked for"):
            await service.run(job("a", "b", "c"))
        second.close()
        service.stop_admitting()
        with pytest.raises(DrainingError):
            await service.run(job())
        assert service.unready == (
            "the server is shutting down and takes no more requests; ask another replica"
        )
        assert service.unhealthy is None
        first.close()
        service.admission.draining = False

    setup.run(test)
    assert setup.heard.refusals == ["queue_full", "draining"]
    assert len(setup.engine.added) == 2


def test_what_the_engine_refuses_leaves_no_count() -> None:
    """A prompt that cannot be served is the request's fault, and takes no place."""
    setup = Setup()

    async def test(service: Service) -> None:
        with pytest.raises(RequestError, match="the prompt is empty"):
            await service.run(Job(prompts=[ids("a"), []], params=ENDLESS))
        assert service.admission.num_open == 0

    setup.run(test)


def test_draining_ends_what_does_not_end_by_itself() -> None:
    """Also a request that the engine takes only after the time is over."""
    setup = Setup()

    async def test(service: Service) -> None:
        running = await service.run(job())
        await anext(running)
        await setup.hold()
        late = service.run(job())
        entering = asyncio.ensure_future(late._enter())
        await until(lambda: service.admission.num_open == 2)
        assert not await service.drain(0.05)
        setup.gate.open()
        await entering
        for stream in (running, late):
            last = [chunk async for chunk in stream][-1]
            assert last.finish_reason == "abort"

    setup.run(test)
    assert setup.heard.ends == ["abort", "abort"]


def test_retry_after_grows_with_the_queue() -> None:
    """About as long as a row takes to come free, within a minute."""
    setup = Setup(max_rows=1, max_queued_requests=300)

    async def test(service: Service) -> None:
        before = service.admission.retry_after_s
        streams = [await service.run(job()) for _ in range(40)]
        assert before < service.admission.retry_after_s <= 60
        assert service.load() == {
            "num_requests_running": 1,
            "num_requests_waiting": 39,
            "num_queued_tokens": service.admission.queued_tokens,
            "server_load": 40,
        }
        for stream in streams:
            stream.close()

    setup.run(test)


def test_a_closed_engine_is_told_to_who_comes() -> None:
    """No job is admitted to an engine that has stopped."""
    setup = Setup()
    setup.llm.close()

    async def main() -> None:
        service = Service(setup.llm, setup.settings, listener=setup.heard)
        with pytest.raises(EngineStoppedError):
            await service.run(job())
        assert service.unhealthy
        assert await service.report() == {}

    asyncio.run(main())
    assert setup.heard.refusals == ["engine_stopped"]


def test_answers_of_an_engine_that_stops_end_with_an_error() -> None:
    """They are counted as what they are, once each; what the engine had refused is no answer."""
    setup = Setup()

    async def main() -> None:
        service = Service(setup.llm, setup.settings, listener=setup.heard)
        with pytest.raises(RequestError, match="the prompt is empty"):
            await service.run(Job(prompts=[ids("a"), []], params=ENDLESS))
        assert setup.heard.lefts == []
        stream = await service.run(job("a", "b"))
        await asyncio.to_thread(setup.llm.close)
        with pytest.raises(EngineStoppedError):
            async for _ in stream:
                pass
        stream.close()

    asyncio.run(main())
    assert [why for why, _ in setup.heard.lefts] == ["error"] * 2


def test_a_report_does_not_wait_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics shows the last figures where the engine does not answer."""
    from paceline.api.server import service as module

    monkeypatch.setattr(module, "_REPORT_S", TIMEOUT)
    setup = Setup()

    async def test(service: Service) -> None:
        report = await service.report()
        assert report["num_steps"] == 0
        stream = await service.run(job())
        await setup.hold()
        monkeypatch.setattr(module, "_REPORT_S", 0.05)
        assert await service.report() == report
        assert service.llm.step_seconds > 0
        setup.gate.open()
        stream.close()

    setup.run(test)
