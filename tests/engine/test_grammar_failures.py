"""Grammars that do not go on: their row ends and says whose fault it is, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.core.errors import RequestError
from paceline.core.request import Fault, FinishReason, Request, SamplingParams
from paceline.engine.guides import Failure, Guide
from tests import grammars, tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine, request, run
from tests.grammar_rules import Rule, V, thirds

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=1)


class Broken(Rule):
    """Fails at some point of an answer, each time in one way."""

    def __init__(self, way: str, at: int) -> None:
        super().__init__(lambda _: set(range(3, 90)))
        self.way, self.at = way, at

    def _now(self, way: str) -> bool:
        return self.way == way and len(self.path) >= self.at

    def mask(self) -> bytes:
        if self._now("mask raises"):
            msg = "the parser is too complex"
            raise RuntimeError(msg)
        if self._now("nothing allowed"):
            return bytes(16)
        if self._now("short mask"):
            return b"\xff" * 4
        return sum(1 << t for t in self.rule(())).to_bytes(16, "little")

    def advance(self, token_id: int) -> bool:
        if self._now("advance raises"):
            msg = "no way on"
            raise RuntimeError(msg)
        return not self._now("refuses") and super().advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        if self._now("rollback raises"):
            msg = "no way back"
            raise RuntimeError(msg)
        super().rollback(num_tokens)

    def forced(self) -> Sequence[int]:
        if self._now("forced raises"):
            msg = "no idea"
            raise RuntimeError(msg)
        return ()


WAYS = {
    "mask raises": "the parser is too complex",
    "nothing allowed": "allows no token",
    "short mask": "4 bytes instead of 16",
    "advance raises": "no way on",
    "refuses": "cannot go on with it",
    "rollback raises": "no way back",
    "forced raises": "no idea",
}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_that_fails_ends_its_own_row(llama: Path, way: str, at: int, gpu: bool) -> None:
    """The row ends with an error that says why; its company goes on, and nothing leaks."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = [11, 12, 13, 14, 15] * 5 + [11, 12]

    def others() -> list[Request]:
        free = request("free", prompt, params)
        return [free, grammars.constrained("form", [5, 6], GREEDY, "form")]

    eng = engine(llama, method="suffix")
    if gpu:
        as_on_gpu(eng)
    bad = Request(id="bad", prompt_ids=prompt, params=params, grammar=Broken(way, at))
    done = run(eng, [others()[0], bad, others()[1]])
    wanted = run(engine(llama, method="none"), others())
    assert {k: done[k].tokens for k in wanted} == {k: wanted[k].tokens for k in wanted}
    assert eng.num_running == 0
    last = done["bad"].last
    if last.finish_reason is FinishReason.LENGTH:
        assert way == "rollback raises", "who is never led back does not fail"
        return
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert any(part in last.error for part in WAYS[way].split("|")), last.error
    assert "other requests go on" in last.error
    asked_for = way in {"nothing allowed", "refuses"}
    assert last.fault is (Fault.REQUEST if asked_for else Fault.ENGINE)
    assert len(done["bad"].tokens) <= at + 8


CONTRADICTIONS = {
    "allowed": (
        SamplingParams(temperature=0.0, max_tokens=24, allowed_token_ids=[3, 4]),
        "allowed_",
    ),
    "banned": (
        SamplingParams(temperature=1.0, seed=3, max_tokens=24, banned_token_ids=range(3, 97)),
        "banned_token_ids",
    ),
}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("method", ["none", "suffix"])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_options_that_a_grammar_contradicts_are_the_requests_fault(
    llama: Path, name: str, method: str, gpu: bool
) -> None:
    """The row ends and says which options; its company goes on; what is emitted is that of plain decoding."""
    params, named = CONTRADICTIONS[name]
    bad = grammars.constrained("bad", [5, 6], params, "form")
    free = request("free", [11, 12, 13] * 4, GREEDY)
    form = grammars.constrained("form", [5, 6], GREEDY, "form")
    eng = engine(llama, method=method)
    if gpu:
        as_on_gpu(eng)
    done = run(eng, [free, bad, form])
    wanted = run(
        engine(llama, method="none"),
        [
            request("free", [11, 12, 13] * 4, GREEDY),
            grammars.constrained("form", [5, 6], GREEDY, "form"),
            grammars.constrained("bad", [5, 6], params, "form"),
        ],
    )
    assert {k: v.tokens for k, v in done.items()} == {k: v.tokens for k, v in wanted.items()}
    last = done["bad"].last
    assert (last.finish_reason, last.fault) == (FinishReason.ERROR, Fault.REQUEST)
    assert last.error == wanted["bad"].last.error
    assert last.error is not None
    assert named in last.error
    assert "allows only token ids" in last.error
    assert "allow one of these" in last.error


@pytest.mark.parametrize("error", [RequestError("too complex"), RuntimeError("a bug")])
def test_whose_fault_a_failed_grammar_is(error: Exception) -> None:
    """A request may ask for what cannot be followed; all else is the implementation's."""

    class Raising(Rule):
        def mask(self) -> bytes:
            raise error

    for way in ("mask", "advance"):
        rule = Raising(thirds) if way == "mask" else Rule(thirds)
        if way == "advance":
            rule.rule = lambda _: (_ for _ in ()).throw(error)
        found = Guide(rule, V).allowed_after([] if way == "mask" else [3])
        assert isinstance(found, Failure)
        expected = Fault.REQUEST if isinstance(error, RequestError) else Fault.ENGINE
        assert (found.fault, str(error) in found.why) == (expected, True)
