"""Tokenizers rebuilt from GGUF metadata, against those that transformers rebuilds from the same file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from paceline.api.gguf_tokenizer import read_gguf
from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import ModelError
from tests import tiny_tokenizers
from tests.tiny_tokenizers import STRESS, byte_level_metadata, sentencepiece_metadata, write_gguf

RULES = ("default", "gpt-2", "smollm", "llama-bpe", "llama3", "qwen2", "deepseek-r1-qwen", "tekken")
COMPOSED = [text for text in STRESS if "\u0301" not in text and "\u0323" not in text]


def oracle(file: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("pre", RULES)
def test_byte_level_rules_equal_transformers(tmp_path: Path, pre: str) -> None:
    """Every known rule cuts words as transformers cuts them, and adds the same special tokens."""
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    file = write_gguf(tmp_path / "m.gguf", byte_level_metadata(pre, **changes))
    ours, theirs = Tokenizer.from_files(file), oracle(file)
    texts = [*COMPOSED, tiny_tokenizers.CORPUS, "a <think>b</think></s> c<s>"]
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids
        plain = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == plain
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)


def test_words_are_cut_by_the_rule_of_the_name() -> None:
    """The rules differ, and a name picks its own: three digits, one digit, or all of them together."""
    text = "12345"
    cut = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2"):
        backend = read_gguf(byte_level_metadata(pre)).backend
        cut[pre] = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == {"gpt-2": ["12345"], "llama-bpe": ["123", "45"], "qwen2": list(text)}


def test_llama3_takes_whole_words_without_merges() -> None:
    """Llama 3 has words that no merge reaches; its own tokenizer takes them whole."""
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        metadata = byte_level_metadata(pre)
        metadata["tokenizer.ggml.tokens"].append("zebra")
        tokenizer = Tokenizer(read_gguf(metadata))
        ids = tokenizer.encode("zebra", add_special_tokens=False)
        assert (ids == [tokenizer.vocab_size - 1]) == whole


def test_qwen2_normalises() -> None:
    """Qwen2 was trained on composed letters."""
    tokenizer = Tokenizer(read_gguf(byte_level_metadata("qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    "pre,stated,added",
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_bos_is_added_as_the_family_does(pre: str, stated: bool | None, added: bool) -> None:
    """Without a flag in the file the family's habit counts; with one, the flag."""
    metadata = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": stated})
    ids = Tokenizer(read_gguf(metadata)).encode("fox")
    assert (ids[0] == 0) == added


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    """Merges are recovered from scores, unknown characters fall back to bytes."""
    file = write_gguf(tmp_path / "m.gguf", sentencepiece_metadata())
    ours, theirs = Tokenizer.from_files(file), oracle(file)
    for text in [*STRESS, "the quick fox", "hello world, the  dog", " hello</s>the dog<s> hello"]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("the quick fox")[0] == 1
    assert len(ours.encode("the quick fox", add_special_tokens=False)) == 3


def test_merges_follow_the_scores(tmp_path: Path) -> None:
    """Which pair is joined first is decided by scores, and among equal ones as transformers decides."""
    strings = ["".join(s) for n in range(1, 5) for s in itertools.product("ab", repeat=n)]
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *strings]
    scores = [0.0, 0.0, 0.0, -9.0, *(-float(i * 7 % 11 // 2) for i in range(len(strings)))]
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(tokens) - 3)],
    }
    file = write_gguf(tmp_path / "m.gguf", sentencepiece_metadata(**changes))
    ours, theirs = Tokenizer.from_files(file), oracle(file)
    for length in range(1, 9):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert ours.encode(text) == theirs(text).input_ids


def test_sentencepiece_tokens_show_their_bytes() -> None:
    """Logprobs show a space as a space and a byte token as its byte."""
    tokenizer = tiny_tokenizers.sentencepiece()
    ids = tokenizer.encode("the 👋", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " the 👋"


def test_a_space_prefix_can_be_off() -> None:
    """A file may say that no space is put in front of a text; then none is dropped either."""
    tokenizer = tiny_tokenizers.sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    for text in ("the fox", " the fox"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_all_ends_of_text_are_known() -> None:
    """End of text, of turn and of message all end an answer, each once."""
    changes = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 1}
    assert read_gguf(byte_level_metadata(**changes)).eos_token_ids == (1, 5)


def test_chat_templates_come_with_their_names() -> None:
    """A file may hold several templates."""
    changes = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    parts = read_gguf(byte_level_metadata(**changes))
    assert parts.chat_templates == {"default": "A", "tool_use": "B"}


def test_a_file_without_a_rule_is_read_as_gpt2(caplog: pytest.LogCaptureFixture) -> None:
    """Old files name no rule: it is said, not hidden."""
    assert Tokenizer(read_gguf(byte_level_metadata(None))).encode("the fox")
    assert "tokenizer.ggml.pre" in caplog.text


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"tokenizer.ggml.pre": "viking"}, r"'viking'.*known rules: default, gpt-2, smollm"),
        ({"tokenizer.ggml.model": "bert"}, r"kind 'bert'.*'gpt2'"),
        ({"tokenizer.ggml.model": None}, r"kind None"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens is missing, empty"),
        ({"tokenizer.ggml.merges": [1, 2]}, r"tokenizer\.ggml\.merges .*wrong type"),
        ({"tokenizer.ggml.merges": ["Ġ not-there"]}, r"every merge must join two tokens"),
        ({"tokenizer.ggml.eos_token_id": 99_999}, r"eos_token_id is 99999; ids 0 \.\.\. \d+ are"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, Any], says: str) -> None:
    """A tokenizer that would give other ids is refused with what is possible and what to do."""
    with pytest.raises(ModelError, match=says) as caught:
        read_gguf(byte_level_metadata(**changes))
    assert "use the model's folder" in str(caught.value) or "download" in str(caught.value)


def test_scores_must_fit_the_tokens() -> None:
    """A vocabulary with a score too few is damaged, not cut."""
    with pytest.raises(ModelError, match="1 scores for"):
        read_gguf(sentencepiece_metadata(**{"tokenizer.ggml.scores": [0.0]}))
