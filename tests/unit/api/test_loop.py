from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.api.loop import EngineLoop
from paceline.core.errors import EngineStoppedError, RequestError
from paceline.core.request import FinishReason, Request, SamplingParams, StepOutput
from tests.fake_engine import FakeEngine

TIMEOUT = 20.0  # seconds until a broken loop fails a test instead of hanging it


def request(name: str, *, max_tokens: int = 7, prompt: tuple[int, ...] = (5, 6)) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


def drain(inbox: SimpleQueue[StepOutput | EngineStoppedError]) -> list[StepOutput]:
    outputs = []
    while True:
        item = inbox.get(timeout=TIMEOUT)
        if isinstance(item, EngineStoppedError):
            raise item
        outputs.append(item)
        if item.finish_reason is not None:
            return outputs


@pytest.fixture
def gate():
    """Holds the engine's first step until it is set."""
    return threading.Event()


def test_outputs_arrive_in_order_and_the_seed_is_told() -> None:
    """A request's tokens reach its sink in order, the last output with reason and statistics."""
    engine = FakeEngine([10, 11, 12, 13])
    loop = EngineLoop(engine)
    inbox = SimpleQueue()
    (seed,) = loop.submit([request("a")], inbox.put).result(TIMEOUT)
    outputs = drain(inbox)
    assert [t for o in outputs for t in o.token_ids] == [10, 11, 12, 13, 10, 11, 12]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].stats is not None
    assert outputs[-1].stats.seed == seed
    loop.close()


def test_a_refused_request_takes_its_companions_with_it_and_nobody_else() -> None:
    """Requests submitted together are added all or none; others go on undisturbed."""
    engine = FakeEngine([10, 11])
    loop = EngineLoop(engine)
    good, bad = SimpleQueue(), SimpleQueue()
    loop.submit([request("good", max_tokens=50)], good.put).result(TIMEOUT)
    refused = loop.submit([request("x"), request("empty", prompt=())], bad.put)
    with pytest.raises(RequestError, match="request 2 of 2: the prompt is empty"):
        refused.result(TIMEOUT)
    assert len([t for o in drain(good) for t in o.token_ids]) == 50
    assert bad.empty()
    assert engine.aborted == ["x"]
    loop.close()


def test_whoever_hears_of_a_refusal_may_abort_what_was_refused() -> None:
    """Its companions were ended with it, and are not ended again before the next step."""
    engine = FakeEngine([10, 11])
    loop = EngineLoop(engine)
    held, go = threading.Event(), threading.Event()

    def hold(_: FakeEngine) -> None:
        held.set()
        go.wait(TIMEOUT)

    loop.call(hold)
    assert held.wait(TIMEOUT)
    refused = loop.submit([request("x"), request("empty", prompt=())], SimpleQueue().put)
    loop.abort(["x", "empty"])
    go.set()
    with pytest.raises(RequestError):
        refused.result(TIMEOUT)
    loop.close()
    assert engine.aborted == ["x"]


def test_abort_ends_with_a_last_output(gate: threading.Event) -> None:
    """Whoever waits for an aborted request is told that it ended."""
    engine = FakeEngine([10], on_step=lambda _: gate.wait(TIMEOUT))
    loop = EngineLoop(engine)
    inbox = SimpleQueue()
    loop.submit([request("a", max_tokens=100)], inbox.put).result(TIMEOUT)
    loop.abort(["a", "unknown"])
    gate.set()
    assert drain(inbox)[-1].finish_reason is FinishReason.ABORT
    loop.close()
    loop.abort(["a"])  # after the end: nothing to do, nothing wrong


def test_a_failing_step_ends_every_open_request(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for ever after the engine broke, and later requests hear why."""

    def on_step(number: int) -> None:
        gate.wait(TIMEOUT)
        if number == 2:
            msg = "the cable is loose"
            raise ValueError(msg)

    loop = EngineLoop(FakeEngine([10], on_step=on_step))
    one, other = SimpleQueue(), SimpleQueue()
    loop.submit([request("a")], one.put).result(TIMEOUT)
    loop.submit([request("b")], other.put)
    gate.set()
    for inbox in (one, other):
        with pytest.raises(EngineStoppedError, match="ValueError: the cable is loose"):
            drain(inbox)
    loop.close()
    with pytest.raises(EngineStoppedError, match="cable") as caught:
        loop.submit([request("c")], one.put)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EngineStoppedError, match="cable"):
        loop.call(lambda _: None)
    assert loop.stopped is not None


class Watched(FakeEngine):
    """Writes down what its steps do; `calls` says whether they tell when others may have Python."""

    def __init__(self, *, calls: bool, **options: Any) -> None:
        super().__init__([10, 11], **options)
        self.events: list[str] = []
        self._calls = calls

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> list[StepOutput]:
        self.events.append("step")
        if self._calls:
            meanwhile()
            self.events.append("compute")
        made = super().step()
        self.events.append("end")
        return made


def watched(*, calls: bool) -> list[str]:
    """What happens in an answer of three steps; "sink": an output is handed over."""
    engine = Watched(calls=calls)
    loop, inbox = EngineLoop(engine), SimpleQueue()

    def sink(output: StepOutput | EngineStoppedError) -> None:
        engine.events.append("sink")
        inbox.put(output)

    loop.submit([request("a")], sink)
    tokens = [t for o in drain(inbox) for t in o.token_ids]
    loop.close()
    assert tokens == [10, 11, 10, 11, 10, 11, 10]
    return engine.events


def test_tokens_are_handed_over_while_the_next_step_computes() -> None:
    """Not between two steps, when whoever wakes up takes Python from the engine; the last at once."""
    first, then = ["step", "compute", "end"], ["step", "sink", "compute", "end"]
    assert watched(calls=True) == [*first, *then, *then, "sink"]


def test_tokens_do_not_wait_for_a_step_that_computes_nothing() -> None:
    """Such a step never says that it computes; they are handed over when it has ended."""
    first, then = ["step", "end"], ["step", "end", "sink"]
    assert watched(calls=False) == [*first, *then, *then, "sink"]


def test_what_was_made_before_a_failing_step_is_handed_over() -> None:
    """It is as right as ever; the error comes after it."""

    def on_step(number: int) -> None:
        if number == 2:
            msg = "the cable is loose"
            raise ValueError(msg)

    loop, inbox = EngineLoop(Watched(calls=False, on_step=on_step)), SimpleQueue()
    loop.submit([request("a")], inbox.put)
    assert inbox.get(timeout=TIMEOUT).token_ids == (10,)
    assert isinstance(inbox.get(timeout=TIMEOUT), EngineStoppedError)
    loop.close()


def test_a_name_may_be_used_again_as_soon_as_the_engine_has_forgotten_it() -> None:
    """Each sink gets its own request's outputs, the last one among them."""
    engine = FakeEngine([10, 11])
    boxes = SimpleQueue(), SimpleQueue()

    def again(number: int) -> None:
        if (
            number == 2
        ):  # "a" ends in this step; "b" keeps the engine busy, so nothing is handed over yet
            loop.submit([request("a", max_tokens=2)], boxes[1].put)

    engine._on_step = again
    loop = EngineLoop(engine)
    rest = SimpleQueue()
    loop.submit([request("a", max_tokens=4)], boxes[0].put)
    loop.submit([request("b", max_tokens=60)], rest.put)
    assert [len([t for o in drain(box) for t in o.token_ids]) for box in boxes] == [4, 2]
    drain(rest)
    loop.close()


def test_a_failing_sink_loses_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    """A fault in one consumer may not stop the others, nor keep its request running."""

    def broken(_: object) -> None:
        msg = "full"
        raise RuntimeError(msg)

    engine = FakeEngine([10, 11])
    loop = EngineLoop(engine)
    inbox = SimpleQueue()
    loop.submit([request("bad", max_tokens=10_000)], broken)
    loop.submit([request("good", max_tokens=40)], inbox.put)
    assert len([t for o in drain(inbox) for t in o.token_ids]) == 40
    assert engine.aborted == ["bad"]
    assert not loop.call(lambda e: e.has_work).result(TIMEOUT)
    loop.close()


def test_close_ends_what_is_open_and_may_be_repeated(gate: threading.Event) -> None:
    """Closing frees the engine once, on the thread that owns it, and leaves nobody waiting."""
    engine = FakeEngine([10], on_step=lambda _: gate.wait(TIMEOUT))
    loop = EngineLoop(engine)
    inbox = SimpleQueue()
    loop.submit([request("a", max_tokens=10_000)], inbox.put).result(TIMEOUT)
    gate.set()
    loop.close()
    loop.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        drain(inbox)
    (closer,) = engine.closed_by
    assert closer.name == "paceline-engine"
    assert not closer.is_alive()


def test_commands_left_behind_are_answered(gate: threading.Event) -> None:
    """A submission that crosses a close is refused, not forgotten."""
    engine = FakeEngine([10], on_step=lambda _: gate.wait(TIMEOUT))
    loop = EngineLoop(engine)
    loop.submit([request("a")], lambda _: None).result(TIMEOUT)
    closer = threading.Thread(target=loop.close)
    closer.start()
    late = loop.submit([request("b")], lambda _: None)
    asked = loop.call(lambda _: 1)
    gate.set()
    closer.join(TIMEOUT)
    for future in (late, asked):  # whichever came first, each has an outcome
        with contextlib.suppress(EngineStoppedError):
            assert future.result(TIMEOUT) is not None


def test_a_cancelled_submission_is_not_added(gate: threading.Event) -> None:
    """Who gives up before the engine heard of a request costs nothing."""
    engine = FakeEngine([10], on_step=lambda _: gate.wait(TIMEOUT))
    loop = EngineLoop(engine)
    loop.submit([request("a")], lambda _: None).result(TIMEOUT)
    late = loop.submit([request("b")], lambda _: None)
    assert late.cancel()
    gate.set()
    loop.close()
    assert [r.id for r in engine.added] == ["a"]


def test_an_idle_loop_sleeps() -> None:
    """Without work the thread waits; it neither steps nor polls."""
    engine = FakeEngine([10])
    loop = EngineLoop(engine)
    inbox = SimpleQueue()
    loop.submit([request("a")], inbox.put)
    drain(inbox)
    loop.call(lambda _: None).result(TIMEOUT)
    steps, asked = engine.num_steps, engine.num_asked
    time.sleep(0.05)
    loop.call(lambda _: None).result(TIMEOUT)
    assert engine.num_steps == steps
    assert engine.num_asked - asked <= 3
    loop.close()


def test_everything_runs_on_the_one_thread() -> None:
    """PyTorch's thread count is per thread, so preparation happens where the steps happen."""
    where: list[threading.Thread] = []
    engine = FakeEngine([10], on_step=lambda _: where.append(threading.current_thread()))
    loop = EngineLoop(engine, prepare=lambda: where.append(threading.current_thread()))
    inbox = SimpleQueue()
    loop.submit([request("a")], inbox.put)
    drain(inbox)
    where.append(loop.call(lambda _: threading.current_thread()).result(TIMEOUT))
    loop.close()
    assert len(set(where)) == 1
    assert where[0] is not threading.current_thread()


def test_a_failing_call_fails_its_caller_only() -> None:
    """An error of a function that looked at the engine belongs to whoever asked."""
    loop = EngineLoop(FakeEngine([10]))
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda _: 1 / 0).result(TIMEOUT)
    assert loop.call(lambda _: 3).result(TIMEOUT) == 3
    loop.close()


def test_many_threads_may_submit_and_abort() -> None:
    """Submissions and aborts from many threads lose nothing and mix nothing up."""
    engine = FakeEngine(lambda r, _: [int(r.id.split("-")[0])])
    loop = EngineLoop(engine)
    wrong: list[str] = []

    def work(me: int) -> None:
        for i in range(20):
            inbox = SimpleQueue()
            name = f"{me}-{i}"
            loop.submit([request(name, max_tokens=9)], inbox.put)
            if i % 3 == 0:
                loop.abort([name])
            outputs = drain(inbox)
            tokens = [t for o in outputs for t in o.token_ids]
            aborted = outputs[-1].finish_reason is FinishReason.ABORT
            if set(tokens) - {me} or (len(tokens) != 9 and not aborted):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(10, 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert not wrong
    assert not loop.call(lambda e: e.has_work).result(TIMEOUT)
    loop.close()
