"""The bundled model's tokenizer against transformers', which is the definition of its ids."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from paceline.api.tokenizer import Tokenizer
from tests import tiny_tokenizers
from tests.tiny_tokenizers import ROOT, STRESS

SPEC_BENCH = ROOT / "benchmarks" / "prompts" / "spec_bench.jsonl"
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
CHATS = (
    [QUESTION],
    [{"role": "system", "content": "Be brief."}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": " And  3?\n"}],
    [{"role": "user", "content": '<b>&"quoted"</b> 👋 <|im_end|>'}],
    [{"role": "assistant", "content": ""}],
)


@functools.cache
def ours() -> Tokenizer:
    return Tokenizer.from_files(tiny_tokenizers.bundled_file())


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    file = tiny_tokenizers.bundled_file()
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def spec_bench_turns() -> list[str]:
    """The committed sample, or the whole set where PACELINE_SPEC_BENCH says where it is."""
    file = Path(os.environ.get("PACELINE_SPEC_BENCH", SPEC_BENCH))
    lines = file.read_text(encoding="utf-8").splitlines()
    return [turn for line in lines for turn in json.loads(line)["turns"]]


def test_ids_equal_transformers_on_spec_bench(theirs: Any) -> None:
    """Prompts become the ids that the model was measured with."""
    turns = spec_bench_turns()
    assert len(turns) >= 60
    for turn in turns:
        assert ours().encode(turn) == theirs(turn).input_ids


@pytest.mark.parametrize("text", STRESS)
def test_ids_equal_transformers_on_odd_text(theirs: Any, text: str) -> None:
    """Spaces, controls, scripts and emoji become the same ids, and the same text again."""
    ids = ours().encode(text)
    assert ids == theirs(text).input_ids
    assert ours().decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_ids_equal_transformers_on_any_text(theirs: Any) -> None:
    """What nobody thought of becomes the same ids too, special tokens spelled out included."""
    special = st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<jupyter_text>", " <|im"]
    )

    @given(st.lists(st.text(max_size=8) | special | st.from_regex(r"[ \n\t\d.a]{0,8}")))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        assert ours().encode(text) == theirs(text).input_ids

    check()


@functools.cache
def bytes_known() -> frozenset[bytes]:
    """Single bytes that have a token; SmolLM2 lacks 21, six controls and rare lead bytes among them."""
    found = frozenset(ours().token_bytes(i) for i in range(ours().vocab_size))
    return frozenset(bytes([byte]) for byte in range(256)) & found


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    """Byte-level BPE loses nothing that its bytes can spell: decoding gives back the text."""
    assume(all(bytes([byte]) in bytes_known() for byte in text.encode()))
    assert ours().decode(ours().encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 49_151), max_size=12))
def test_token_bytes_join_to_the_text(ids: list[int]) -> None:
    """Logprobs show each token's own bytes, which add up to the answer."""
    joined = b"".join(ours().token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", "replace") == ours().decode(ids, skip_special_tokens=False)


def test_special_tokens_equal_transformers(theirs: Any) -> None:
    """The answer ends, and special tokens are hidden, where transformers does it."""
    assert ours().bos_token_id == theirs.bos_token_id == 1
    assert ours().eos_token_ids == (theirs.eos_token_id,) == (2,)
    assert ours().vocab_size == len(theirs) == 49_152
    assert ours().special_ids == {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert ours().named_tokens == theirs.special_tokens_map


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_transformers(theirs: Any, messages: list[Any], prompt: bool) -> None:
    """A conversation becomes the same text and the same ids."""
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours().chat_text(messages, add_generation_prompt=prompt) == text
    ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    assert ours().encode_chat(messages, add_generation_prompt=prompt) == ids
