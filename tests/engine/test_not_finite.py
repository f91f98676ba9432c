"""A target whose logits are not finite: that request ends with an error, and nobody else notices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import draft as drafters
from paceline.core.registry import Registry
from paceline.core.request import FinishReason, SamplingParams
from paceline.draft import DRAFTERS
from paceline.draft.base import Commit
from paceline.engine import build
from tests.engine import prophet
from tests.engine.harness import Outcome, engine, request, run
from tests.engine.scribe import Scribe
from tests.tiny import write_tiny

PROMPTS = {"a": [11, 12, 13, 14, 15] * 3, "b": [31, 7, 7, 7, 9], "c": [5, 6]}
METHODS = [*DRAFTERS, "prophet"]


@pytest.fixture(autouse=True)
def _prophet_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry line for the drafter that is right."""
    lines = {name: f"paceline.draft.{name}:{name.title()}Drafter" for name in DRAFTERS}
    registry = Registry("drafter", {**lines, "prophet": prophet.LINE})
    monkeypatch.setattr(drafters, "DRAFTERS", registry)
    monkeypatch.setattr(build, "DRAFTERS", registry)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=4)


def broken(folder: Path, sound: Path, token: int) -> Path:
    """The same model, but whoever reads `token` computes NaN from there on."""
    write_tiny(folder, seed=4)
    tensors = load_file(sound / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ask(folder: Path, params: SamplingParams, answers: dict[str, list[int]], **options: object):
    """All prompts at once; `answers` are what a prophet foretells."""
    eng = engine(folder, **{"max_len": 80, **options})
    eng.lag = int(options.get("method") == "none")  # as on a GPU: a step is in flight meanwhile
    if options.get("method") == "prophet":
        known = {name: [*PROMPTS[name], *answers[name]] for name in PROMPTS}
        eng._proposer._drafter.answers |= known
    jobs = [request(name, prompt, params, scope=name) for name, prompt in PROMPTS.items()]
    return eng, run(eng, jobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_request_ends_where_its_logits_stop_being_numbers(
    tmp_path: Path, sound: Path, method: str, temperature: float
) -> None:
    """With every drafter the same tokens, then an error that names request, place and remedy."""
    params = SamplingParams(
        temperature=temperature, max_tokens=20, ignore_eos=True, seed=1, top_k=40, logprobs=2
    )
    _, plain = ask(sound, params, {}, method="none")
    tokens = {name: found.tokens for name, found in plain.items()}
    others = {*tokens["b"], *tokens["c"], *(t for prompt in PROMPTS.values() for t in prompt)}
    at = next(i for i, token in enumerate(tokens["a"]) if i > 2 and token not in others)
    at = tokens["a"].index(tokens["a"][at])
    eng, done = ask(
        broken(tmp_path, sound, tokens["a"][at]), params, tokens, method=method, num_pages=60
    )
    for name in ("b", "c"):
        assert done[name].tokens == tokens[name], "a neighbour was disturbed"
        assert done[name].last.finish_reason is FinishReason.LENGTH
    failed = done["a"]
    assert failed.tokens == tokens["a"][: at + 1]
    assert sum(len(out.logprobs or ()) for out in failed.outputs) == at + 1
    check_error(failed, rf"request a: .* token {len(PROMPTS['a']) + at + 1} .*not finite.*float32")
    assert eng.num_running == 0
    again = run(eng, [request("later", PROMPTS["b"], params, scope="b")])
    assert again["later"].tokens == tokens["b"], "what the failed request left behind is used"


@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_prompt_that_gives_no_logits_ends_without_a_token(
    tmp_path: Path, sound: Path, lag: int, chunk_size: int
) -> None:
    """The first pick fails: no token, no time of a first token, an error; the others decode."""
    folder = broken(tmp_path, sound, 90)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, banned_token_ids=[90])
    eng = engine(folder, method="none", chunk_size=chunk_size, max_len=80)
    eng.lag = lag
    good = request("good", PROMPTS["b"], params)
    done = run(eng, [request("bad", [5, 90, *PROMPTS["a"]], params), good])
    assert done["bad"].tokens == []
    check_error(done["bad"], "request bad: .*output token 0")
    alone = run(engine(sound, method="none", max_len=80), [good])["good"].tokens
    assert done["good"].tokens == alone
    assert eng.num_running == eng.num_waiting == 0


def test_a_mask_that_leaves_only_impossible_tokens_is_an_error(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that rules tokens out (-inf) and a request that allows only those: no choice."""
    eng = engine(sound, method="suffix", max_len=80)
    target = eng._launcher._target
    head = target.head

    def ruling_out(hidden: Tensor) -> Tensor:
        logits = head(hidden).clone()
        logits[:, 20:24] = -torch.inf
        return logits

    monkeypatch.setattr(target, "head", ruling_out)
    free = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=2)
    narrow = SamplingParams(temperature=1.0, max_tokens=8, allowed_token_ids=(20, 21))
    done = run(eng, [request("free", [5], free), request("narrow", [5], narrow)])
    assert len(done["free"].tokens) == 8
    check_error(done["narrow"], "request narrow: .*Allow more tokens")


class Reader(Scribe):
    """A network that looks up the token after each of those it is told."""

    def observe(self, commit: Commit) -> None:
        """As an embedding does."""
        assert int(commit.next_ids.min()) >= 0
        super().observe(commit)


@pytest.mark.parametrize("at", [0, 3])
def test_a_network_is_told_of_no_token_that_is_none(
    tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A drafter network embeds what it observes inside the step, before the host has looked."""
    lines = {"reader": f"{__name__}:Reader"}
    monkeypatch.setattr(drafters, "NETWORKS", Registry("drafter", lines))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    text = run(engine(sound, method="none"), [request("p", [5, 6], params)])["p"].tokens
    folder = broken(tmp_path, sound, text[at - 1] if at else 6)
    done = run(engine(folder, method="reader"), [request("p", [5, 6], params)])["p"]
    assert done.tokens == text[:at]
    check_error(done, "not finite")


def check_error(outcome: Outcome, message: str) -> None:
    """One last output with the error, statistics, and no invented token."""
    assert outcome.last.finish_reason is FinishReason.ERROR
    assert outcome.last.error is not None
    assert re.search(message, outcome.last.error), outcome.last.error
    assert outcome.last.stats is not None
    assert outcome.last.stats.num_output_tokens == len(outcome.tokens)
