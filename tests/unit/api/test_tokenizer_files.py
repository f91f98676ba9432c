"""Tokenizers read from folders in Hugging Face layout, and the errors of the Tokenizer class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import ModelError, RequestError
from tests import tiny_tokenizers
from tests.tiny_tokenizers import write_folder

CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


def read(folder: Path, files: dict[str, Any] | None = None) -> Tokenizer:
    return Tokenizer.from_files(write_folder(folder / "model", files))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
    ],
)
def test_ids_equal_transformers(tmp_path: Path, flags: dict[str, bool]) -> None:
    """A folder's ids are transformers', whoever adds the special tokens around a text."""
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    ours = read(tmp_path, {"tokenizer_config.json": CONFIG | flags})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    for text in [*tiny_tokenizers.STRESS, "a <think>b</s> c<s>"]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        plain = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == plain
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    """The folder and its tokenizer.json are the same tokenizer."""
    folder = write_folder(tmp_path / "m")
    by_file = Tokenizer.from_files(folder / "tokenizer.json")
    assert by_file.encode("fox") == Tokenizer.from_files(str(folder)).encode("fox")


@pytest.mark.parametrize(
    "files,ids",
    [
        ({}, (1,)),
        ({"config.json": {"eos_token_id": 7}}, (1, 7)),
        (
            {"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": 8}},
            (1, 8),
        ),
        ({"generation_config.json": {"eos_token_id": [9, 1, 8, 9]}}, (1, 9, 8)),
        ({"generation_config.json": {"eos_token_id": None}}, (1,)),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": [4, 5]}}, (4, 5)),
    ],
)
def test_end_of_text_ids_are_collected(
    tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]
) -> None:
    """The tokenizer's own end comes first, then generation_config.json's, else config.json's."""
    assert read(tmp_path, files).eos_token_ids == ids


def test_old_folders_name_special_tokens_elsewhere(tmp_path: Path) -> None:
    """special_tokens_map.json is used where tokenizer_config.json names none."""
    files = {"tokenizer_config.json": None, "special_tokens_map.json": CONFIG}
    tokenizer = read(tmp_path, files)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))


def test_ids_stand_in_for_missing_names(tmp_path: Path) -> None:
    """A folder without named tokens still knows its ids from config.json."""
    files = {"tokenizer_config.json": None, "config.json": {"bos_token_id": 3}}
    assert read(tmp_path, files).bos_token_id == 3


def test_named_tokens_are_special(tmp_path: Path) -> None:
    """A token that the config names as end of text is hidden even if tokenizer.json forgot that."""
    config = CONFIG | {"eos_token": "<think>"}
    tokenizer = read(tmp_path, {"tokenizer_config.json": config})
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([2]) == ""
    assert tokenizer.encode("fox<think>")[-1] == 2


def test_added_tokens_of_the_config_are_added(tmp_path: Path) -> None:
    """Tokens that only tokenizer_config.json knows are matched whole, with their stated ids."""
    size = tiny_tokenizers.byte_level().vocab_size
    added = {
        str(size): {"content": "<tool>", "special": False},
        str(size + 1): {"content": "<|end|>", "special": True},
        "0": {"content": "<s>", "special": True},
    }
    config = CONFIG | {"added_tokens_decoder": added}
    tokenizer = read(tmp_path, {"tokenizer_config.json": config})
    assert tokenizer.encode("<tool><|end|>")[1:] == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<tool>"
    assert tokenizer.vocab_size == size + 2


def test_an_added_token_with_another_id_is_refused(tmp_path: Path) -> None:
    """Files from different models must not be mixed silently."""
    config = CONFIG | {"added_tokens_decoder": {"9999": {"content": "<tool>"}}}
    with pytest.raises(ModelError, match=r"'<tool>'.*the file says 9999"):
        read(tmp_path, {"tokenizer_config.json": config})


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """Settings left behind by a training run never cut or fill a prompt."""
    folder = write_folder(tmp_path / "m")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    data["padding"] = {
        "strategy": {"Fixed": 999},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    ids = Tokenizer.from_files(folder).encode("one two three four five six")
    assert 4 < len(ids) < 999


def test_chat_templates_are_found_everywhere(tmp_path: Path) -> None:
    """In the config as text or as a list of names, or in files, which win."""
    config = CONFIG | {"chat_template": "one"}
    assert read(tmp_path, {"tokenizer_config.json": config}).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    files = {
        "tokenizer_config.json": CONFIG | {"chat_template": named},
        "chat_template.jinja": "file",
        "additional_chat_templates/rag.jinja": "r",
    }
    found = read(tmp_path, files).chat_templates
    assert found == {"default": "file", "tool_use": "t", "rag": "r"}


@pytest.mark.parametrize(
    "files,says",
    [
        (
            {"tokenizer.json": None},
            r"no tokenizer in .*tokenizer\.json is missing.*save_pretrained",
        ),
        (
            {"tokenizer.json": "{}"},
            r"cannot read the tokenizer .*tokenizer\.json.*download it again",
        ),
        ({"tokenizer.json": '{"version": "1.0", "mod'}, r"cannot read the tokenizer"),
        ({"tokenizer_config.json": "{"}, r"cannot read .*tokenizer_config\.json"),
        ({"tokenizer_config.json": "[]"}, r"holds a list; a JSON object is needed"),
        ({"generation_config.json": "7"}, r"holds a int; a JSON object is needed"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "x"}]}},
            r"cannot use chat_template .*list of objects",
        ),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    """What is wrong is named with its file, what is possible and what to do."""
    with pytest.raises(ModelError, match=says):
        read(tmp_path, files)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    """A wrong path says so."""
    with pytest.raises(ModelError, match=r"no tokenizer at .*nowhere.*check the path"):
        Tokenizer.from_files(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["lone \ud800 surrogate", None, 7])
def test_what_is_no_text_is_refused(text: Any) -> None:
    """Broken Unicode and other types are a request's mistake, not a crash."""
    with pytest.raises(RequestError, match="valid Unicode"):
        tiny_tokenizers.byte_level().encode(text)


def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to continue; the message says what to do."""
    tokenizer = tiny_tokenizers.byte_level()
    with pytest.raises(RequestError, match=r"'' encodes to no tokens.*pass some text"):
        tokenizer.encode_prompt("")
    assert tokenizer.encode_prompt(" ") == tokenizer.encode(" ")
    with_bos = tiny_tokenizers.byte_level(**{"tokenizer.ggml.add_bos_token": True})
    assert with_bos.encode_prompt("") == [0]


@pytest.mark.parametrize("bad", [-1, 1 << 40])
def test_impossible_ids_are_refused(bad: int) -> None:
    """Decoding says which id is impossible."""
    with pytest.raises(RequestError, match=f"token id {bad}; ids 0"):
        tiny_tokenizers.byte_level().decode([5, bad])


def test_tokens_show_their_text() -> None:
    """Each token has bytes and a text for logprobs; special and unknown ids included."""
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode(" fox<think></s>\n", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)) == " fox<think></s>\n"
    ids = tokenizer.encode("漢 é", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "漢 é"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xc3")
    assert tokenizer.token_text(half) == "\ufffd"
