"""Arguments of wrong types through the public interface: a clear error, and the LLM goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path

import pytest

from paceline.api.llm import LLM
from paceline.api.options import engine_config
from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import ConfigError, ModelError, RequestError, TemplateError
from paceline.core.request import SamplingParams
from tests.tiny import write_tiny

SHORT = SamplingParams(max_tokens=3, temperature=0.0)
HELLO = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path):
    with LLM(str(folder), dtype="float32", max_rows=2, max_len=64, threads=1) as found:
        yield found


PROMPTS = [
    None,
    5,
    b"hello",
    {"a": 1},
    [None],
    [[1, 2.5]],
    [[1, "x", 3, 4, 5, 6, 7, 8, 9]],
    [[2**70, 3, 4, 5, 6, 7, 8, 9]],
    [[[1]]],
    [[-1, 3, 4, 5, 6, 7, 8, 9]],
    "a\ud800",
    "",
    [[]],
    [5] * 64,
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: repr(p)[:40])
def test_prompts_of_wrong_kinds_are_refused(llm: LLM, prompt: object) -> None:
    """Whatever is no prompt is a RequestError; bytes are not taken for token ids."""
    with pytest.raises(RequestError):
        llm.generate(prompt, SHORT)
    assert llm.generate("the", SHORT)[0].finish_reason == "length"


@pytest.mark.parametrize("params", [{"temperature": 0}, [5], "x", [None], 5], ids=repr)
def test_parameters_of_wrong_kinds_are_refused(llm: LLM, params: object) -> None:
    """A mapping of parameters is the mistake that everybody makes once."""
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("a", params)


@pytest.mark.parametrize(
    "messages",
    [None, 5, "hi", {"role": "user"}, iter(HELLO)],
    ids=["none", "number", "text", "mapping", "iterator"],
)
def test_conversations_of_wrong_kinds_are_refused(llm: LLM, messages: object) -> None:
    """What is no list of messages is a TemplateError that shows one."""
    with pytest.raises(TemplateError, match="role"):
        llm.chat(messages, SHORT)


@pytest.mark.parametrize("kwargs", [5, {5: 5}, {"messages": 1}, {"add_generation_prompt": 1}])
def test_template_variables_of_wrong_kinds_are_refused(llm: LLM, kwargs: object) -> None:
    """Variables that the call sets itself can't be set twice."""
    with pytest.raises(TemplateError, match="chat_template_kwargs"):
        llm.chat(HELLO, SHORT, chat_template_kwargs=kwargs)


def test_templates_too_deep_to_parse_are_refused(llm: LLM) -> None:
    """A template is foreign: one that exhausts the parser is a TemplateError."""
    source = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
    with pytest.raises(TemplateError, match="does not parse"):
        llm.tokenizer.encode_chat(HELLO, template=source)


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes in chat_template.jinja are damage."""
    write_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="chat_template"):
        Tokenizer.from_files(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"memory_gb": 10**400},
        {"speculative_config": {"suffix_min_token_prob": 10**400}},
        {"speculative_config": "[" * 100_000},
    ],
    ids=["memory", "probability", "deep"],
)
def test_options_beyond_all_bounds_are_refused(options: dict[str, object]) -> None:
    """Numbers and JSON that Python itself gives up on are ConfigErrors."""
    with pytest.raises(ConfigError):
        engine_config(options)


def test_streams_left_behind_by_a_closed_event_loop_end_in_silence(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """`break` in `asyncio.run` closes the loop before the abort is through: nothing to log."""
    long = SamplingParams(max_tokens=50, ignore_eos=True)

    async def first() -> None:
        async for _ in llm.stream("the", long):
            break

    with caplog.at_level(logging.ERROR, logger="paceline"):
        for _ in range(5):
            asyncio.run(first())
        gc.collect()
        assert llm.generate("the", SHORT)
    assert llm.report()["num_running"] == 0
    assert not caplog.records
