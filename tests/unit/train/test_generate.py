"""Answers through the engine: equal to what it says by itself, held-out ones greedy, jobs resumed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from paceline.train import generate as generating
from paceline.train import prepare as module
from paceline.train.generate import OWN_GROUP, Generator
from paceline.train.jobs import JobList
from paceline.train.prepare import facts, is_held_out, prepare, user_turn_header
from paceline.train.settings import TrainSettings
from paceline.train.shards import Shards, ShardWriter
from tests.engine.harness import STOP_ID, engine, request, run

SETTINGS = TrainSettings(
    max_new_tokens=12, max_prompt_tokens=80, held_out=0.3, own_share=0.4, temperatures=(0.0, 1.0)
)
ABOUT = {"model": "tiny"}


@pytest.fixture(scope="module")
def tokenizer(target_folder: Path) -> Tokenizer:
    """The tiny target's."""
    return Tokenizer.from_files(target_folder)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Twenty short prompts and a long one."""
    texts = [f"say {i} and the other" for i in range(20)] + ["x" * 200]
    lines = [
        {
            "messages": [{"role": "user", "content": t}],
            "category": "c",
            "source": "s",
            "licence": "MIT",
        }
        for t in texts
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture
def prompts(tmp_path: Path, tokenizer: Tokenizer, prompt_file: Path) -> Shards:
    """The same, prepared."""
    prepare_(tmp_path / "prompts", tokenizer, prompt_file)
    return Shards(tmp_path / "prompts")


def prepare_(folder: Path, tokenizer: Tokenizer, *paths: Path) -> module.PromptFacts:
    return prepare(
        paths, folder, tokenizer, vocab_size=97, broken="refuse", max_tokens=80, held_out=0.3
    )


def silent(*_: object) -> None:
    """No progress is shown."""


def generate(
    eng: Engine,
    tokenizer: Tokenizer,
    prompts: Shards,
    folder: Path,
    goal: int,
    deadline: float | None = None,
    settings: TrainSettings = SETTINGS,
) -> Generator:
    writer = ShardWriter(folder, 97, ABOUT)
    done = frozenset(Shards(folder).docs["job"].tolist())
    made = Generator(eng, tokenizer, prompts, writer, settings, done)
    jobs = JobList(len(prompts), settings.temperatures, settings.own_share, seed=0)
    made.run(jobs, goal, deadline, silent)
    return made


def test_prepared_prompts_are_the_chat_template_s(
    tmp_path: Path, tokenizer: Tokenizer, prompt_file: Path, prompts: Shards
) -> None:
    """Token ids as in service; long ones counted and left out; a hash decides what is held out."""
    lines = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    ids = [tokenizer.encode_chat(line["messages"]) for line in lines]
    assert [prompts.tokens(i).tolist() for i in range(len(prompts))] == ids[:20]
    assert [bool(x) for x in prompts.docs["held_out"]] == [is_held_out(x, 0.3) for x in ids[:20]]
    assert 0 < prompts.docs["held_out"].sum() < 20
    found = facts(tmp_path / "prompts")
    assert found is not None
    assert (found.num_prompts, found.num_too_long, found.num_broken) == (20, 1, 0)
    assert found.sources == {"s (MIT)": 20}


def test_prompts_are_prepared_once(
    tmp_path: Path, tokenizer: Tokenizer, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call reads no line; other files are refused; a killed first call leaves nothing."""
    folder = tmp_path / "p"
    first = prepare_(folder, tokenizer, prompt_file)
    monkeypatch.setattr(module, "read_prompts", None)
    assert prepare_(folder, tokenizer, prompt_file) == first
    monkeypatch.undo()
    with prompt_file.open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match="a run has one set of prompts"):
        prepare_(folder, tokenizer, prompt_file)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(module, "replacing", killed)
    with pytest.raises(Killed):
        prepare_(tmp_path / "q", tokenizer, prompt_file)
    monkeypatch.undo()
    assert facts(tmp_path / "q") is None
    assert prepare_(tmp_path / "q", tokenizer, prompt_file).num_prompts == 20


def test_prompts_that_are_all_too_long_are_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The message has the limit."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 300}]}))
    with pytest.raises(ConfigError, match="all 1 prompts are longer than 80 tokens"):
        prepare_(tmp_path / "p", tokenizer, path)


def test_answers_are_the_engine_s_own(
    tmp_path: Path, tokenizer: Tokenizer, target_folder: Path, prompts: Shards
) -> None:
    """Stored answers equal single requests with the job's temperature and seed."""
    eng = engine(target_folder, method="none", num_speculative_tokens=0)
    counts = generate(eng, tokenizer, prompts, tmp_path / "answers", 150).counts
    answers = Shards(tmp_path / "answers")
    assert len(answers) == counts.answers
    assert answers.num_answer_tokens == counts.tokens >= 150
    jobs = {j.index: j for j, _ in zip(JobList(20, (0.0, 1.0), 0.4, 0), range(60), strict=False)}
    kinds = set()
    full = [
        i
        for i in range(len(answers))
        if answers.docs["length"][i] - answers.docs["prompt"][i] == 12
    ]
    assert len(full) > 4
    for i in full:
        record, tokens = answers.docs[i], answers.tokens(i).tolist()
        job = jobs[int(record["job"])]
        prompt = tokens[: record["prompt"]]
        held_out = bool(record["held_out"])
        assert held_out == is_held_out(prompt, 0.3)
        assert record["temperature"] == (0.0 if held_out else job.temperature)
        if job.prompt is None:
            assert record["group"].decode() == OWN_GROUP
        else:
            assert prompt == prompts.tokens(job.prompt).tolist()
        params = SamplingParams(
            max_tokens=12, temperature=float(record["temperature"]), seed=job.seed
        )
        alone = run(engine(target_folder, method="none"), [request("x", prompt, params)])
        assert tokens[record["prompt"] :] == alone["x"].tokens
        kinds.add((job.prompt is None, held_out))
    assert len(kinds) >= 3


def test_the_targets_own_prompts_go_through_the_chat_template(
    tmp_path: Path, tokenizer: Tokenizer, target_folder: Path, prompts: Shards
) -> None:
    """They start with the bare opening of a user's turn and are tokens as a client would send them."""
    eng = engine(target_folder, method="none", num_speculative_tokens=0)
    counts = generate(eng, tokenizer, prompts, tmp_path / "answers", 300).counts
    answers = Shards(tmp_path / "answers")
    own = [i for i in range(len(answers)) if answers.docs["group"][i] == OWN_GROUP.encode()]
    assert counts.own_prompts >= len(own) > 2
    header = user_turn_header(tokenizer)
    opening, closing = tokenizer.chat_text([{"role": "user", "content": "@"}]).split("@")
    for i in own:
        ids = answers.tokens(i)[: answers.docs["prompt"][i]].tolist()
        assert ids[: len(header)] == header
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith(opening)
        assert text.endswith(closing)
        inside = text[len(opening) : -len(closing)]
        assert tokenizer.encode_chat([{"role": "user", "content": inside}]) == ids


def test_a_second_call_does_what_is_not_done(
    tmp_path: Path, tokenizer: Tokenizer, target_folder: Path, prompts: Shards
) -> None:
    """No job is done twice; together the calls have done the first jobs of the list."""
    for _ in range(3):
        eng = engine(target_folder, method="none", num_speculative_tokens=0)
        generate(eng, tokenizer, prompts, tmp_path / "answers", 60)
    jobs = Shards(tmp_path / "answers").docs["job"].tolist()
    assert len(jobs) == len(set(jobs)) > 12
    assert min(jobs) < 3


def test_a_deadline_keeps_what_is_long_enough(
    tmp_path: Path,
    tokenizer: Tokenizer,
    target_folder: Path,
    prompts: Shards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers in the making are stored if they have eight tokens and are not held out."""
    ticks = itertools.count()

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return float(next(ticks))

    monkeypatch.setattr(generating, "time", Clock)
    for late in range(24, 36, 2):
        eng = engine(target_folder, method="none", num_speculative_tokens=0)
        now = next(ticks)
        generate(eng, tokenizer, prompts, tmp_path / "answers", 10_000, deadline=now + late)
        assert next(ticks) < now + late + 9
        assert not eng.has_work
    answers = Shards(tmp_path / "answers")
    lengths = answers.docs["length"] - answers.docs["prompt"]
    cut = np.array([answers.tokens(i)[-1] != STOP_ID for i in range(len(answers))]) & (lengths < 12)
    assert cut.any()
    assert (lengths[cut] >= 8).all()
    assert not answers.docs["held_out"][cut].any()


def test_a_template_that_hides_the_user_s_text_is_said(tokenizer: Tokenizer) -> None:
    """Then the target cannot make prompts of its own."""

    class Odd:
        @staticmethod
        def chat_text(_: object) -> str:
            return "nothing of it"

    with pytest.raises(ConfigError, match="--own-share 0"):
        user_turn_header(Odd())


def test_own_prompts_begin_with_the_openings_of_the_run(
    tmp_path: Path, target_folder: Path, tokenizer: Tokenizer, prompts: Shards
) -> None:
    """By turns; the target goes on from them, and a prompt that its length cut is used all the same."""
    openings = ("the other and", "say what")
    settings = replace(SETTINGS, own_share=1.0, openings=openings, own_temperature=0.5)
    eng = engine(target_folder, max_rows=4, max_len=128)
    generate(eng, tokenizer, prompts, tmp_path / "a", goal=100, settings=settings)
    found = Shards(tmp_path / "a")
    own = [i for i, g in enumerate(found.docs["group"]) if g == OWN_GROUP.encode()]
    assert len(own) == len(found) > 4
    texts = [
        tokenizer.decode(found.tokens(i)[: int(found.docs["prompt"][i])].tolist()) for i in own
    ]
    assert {o for o in openings for t in texts if o in t} == set(openings)
    assert all(any(o in t for o in openings) for t in texts)
