"""A drafter network that drafts in vain is named once; one that is only unlucky is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline.core.config import DraftConfig
from paceline.core.request import SamplingParams
from paceline.core.tree import Proposal
from paceline.draft.base import DrafterSpec
from paceline.engine import alarm as alarms
from paceline.engine.alarm import Alarm
from paceline.engine.engine import Engine
from tests import tiny
from tests.engine.as_on_gpu import grower_of
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import overfit_dflash, write_dflash
from tests.tiny_eagle3 import write_eagle3

NETWORK = DrafterSpec(name="net", max_nodes=9, max_depth=4, on_host=False, source=4)
PLAIN = SamplingParams(temperature=0.0)


def made(spec: DrafterSpec = NETWORK) -> Alarm:
    return Alarm(spec, DraftConfig(method="dflash", model="folder"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "in vain" in r.message
    ]


def test_never_right_in_a_few_hundred_steps_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not before; then with the figures and what to do, and never again."""
    alarm = made()
    for _ in range(255):
        alarm.saw(PLAIN, 0)
    assert not warnings(caplog)
    for _ in range(1000):
        alarm.saw(PLAIN, 0)
    (said,) = warnings(caplog)
    assert "asked in 256 of 256 steps, it had the next token right in 0" in said
    assert "paceline check drafter --spec dflash --spec-model folder" in said
    assert not alarm.active


def test_a_policy_that_stops_drafting_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    """Steps without drafts count as steps; 32 with drafts are evidence enough."""
    alarm = made()
    for step in range(320):
        alarm.saw(PLAIN, 0 if step % 10 == 0 else None)
        assert bool(warnings(caplog)) == (step >= 310)


@pytest.mark.parametrize("every", [5, 20])
def test_one_that_is_right_now_and_then_is_left_alone(
    caplog: pytest.LogCaptureFixture, every: int
) -> None:
    """One in five steps is what good drafters reach on text that nobody can know."""
    alarm = made()
    for step in range(2000):
        alarm.saw(PLAIN, 4 if step % every == 0 else 0)
    assert not warnings(caplog)
    assert alarm.active


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5),
        SamplingParams(allowed_token_ids=[5]),
        SamplingParams(banned_token_ids=[5]),
        SamplingParams(logit_bias={5: 3.0}),
    ],
)
def test_choices_that_no_drafter_can_know_do_not_count(
    caplog: pytest.LogCaptureFixture, params: SamplingParams
) -> None:
    """Hot text, and tokens that only the request favours or forbids."""
    alarm = made()
    for _ in range(1000):
        alarm.saw(params, 0)
    assert not warnings(caplog)
    assert alarm.num_steps == 0


def test_whose_node_was_right_first() -> None:
    """Children of the root alone count; another part's right node says nothing about the network."""
    alarm = made()
    tree = Proposal(tokens=[7, 8, 9], parents=[-1, 0, -1], scores=[-1.0] * 3, sources=[4, 4, 1])
    assert alarm.first_right(tree, 7) == 4
    assert alarm.first_right(tree, 8) == 0
    assert alarm.first_right(tree, 9) == 1
    copied = Proposal(tokens=[9], parents=[-1], scores=[-1.0], sources=[1])
    assert alarm.first_right(copied, 3) is None
    assert alarm.first_right(Proposal(tokens=[], parents=[], scores=[]), 3) is None
    alarm.saw(PLAIN, 1)
    assert (alarm.num_steps, alarm.num_asked, alarm.num_right) == (1, 0, 0)


def test_asking_aside_takes_a_hundredth_of_the_time_and_ends() -> None:
    """Until the network was right once, or was asked often enough."""
    alarm = made()
    assert alarm.wants_evidence()
    alarm.took(1.0, 0.5)
    assert not alarm.wants_evidence()
    alarm.took(48.9, 0.0)
    assert not alarm.wants_evidence()
    alarm.took(0.2, 0.0)
    assert alarm.wants_evidence()
    alarm.saw(PLAIN, 4)
    assert not alarm.wants_evidence()
    wrong = made()
    for _ in range(32):
        assert wrong.wants_evidence()
        wrong.saw(PLAIN, 0)
    assert not wrong.wants_evidence()
    assert not made(DrafterSpec(name="suffix", max_nodes=9, max_depth=4, on_host=True)).active


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tokens enough that a random tree holds the right one by chance too rarely."""
    return tiny.write_tiny(tmp_path_factory.mktemp("target"), seed=1, vocab_size=1999)


@pytest.fixture(scope="module")
def knowing(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that half knows what the target says."""
    plain = engine(target, Engine.build, method="none", num_speculative_tokens=0)
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    done = run(plain, [request(str(i), [i + 3, 5, 7], params) for i in range(5)])
    spoken = [[i + 3, 5, 7, *done[str(i)].tokens] for i in range(5)]
    return overfit_dflash(tmp_path_factory.mktemp("knowing") / "it", target, spoken, steps=60)


def decoded(eng: Engine, temperature: float = 0.0, tokens: int = 100) -> None:
    """Four rows at a time, 400 row-steps and more where nothing is accepted."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=1)
    run(eng, [request(str(i), [i + 3, 5, 7], params) for i in range(5)])


@pytest.mark.parametrize("method", ["dflash", "ddtree", "eagle3", "merged"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_random_network_is_named(
    target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    adaptive: bool,
) -> None:
    """Whether all it drafts is verified or the policy has long given it up; by itself or as a part."""
    monkeypatch.setattr(alarms, "_ASIDE_SHARE", 1.0)  # no clock decides
    write = write_eagle3 if method == "eagle3" else write_dflash
    folder = write(tmp_path / "drafter", target)
    short = {"eagle_num_steps": 2} if method == "eagle3" else {}
    eng = engine(target, Engine.build, method=method, model=str(folder), adaptive=adaptive, **short)
    decoded(eng)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_a_tree_that_stays_on_the_device_is_judged_by_what_was_accepted(
    target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """As on a GPU, where the host sees paths only; there all is verified, so that says as much."""
    folder = write_dflash(tmp_path / "drafter", target)
    eng = engine(target, Engine.build, method=method, model=str(folder))
    eng._proposer.grower = grower_of(eng._proposer, 4)
    decoded(eng)
    (said,) = warnings(caplog)
    assert "asked in 256 of 256 steps" in said


@pytest.mark.parametrize("on_device", [False, True])
def test_a_network_that_knows_its_target_is_not_named(
    target: Path,
    knowing: Path,
    caplog: pytest.LogCaptureFixture,
    on_device: bool,
) -> None:
    """Over as many steps, also where it is sampled."""
    eng = engine(target, Engine.build, method="dflash", model=str(knowing))
    if on_device:
        eng._proposer.grower = grower_of(eng._proposer, 4)
    decoded(eng)
    decoded(eng, temperature=1.0)
    assert eng.report()["spec_decode_num_drafts"] > 256
    assert not warnings(caplog)
