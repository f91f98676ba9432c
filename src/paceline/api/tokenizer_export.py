"""A model's tokenizer, chat template and generation settings, put into a folder in Hugging Face layout.

A folder's files are copied as they are; what a GGUF file says is written out. Not for: weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import DEFAULT_TEMPLATE, TOKENIZER_JSON
from paceline.models.source import ModelFiles

_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# What may lie beside tokenizer.json; some engines read the older forms.
_FILES = (
    TOKENIZER_JSON,
    _CONFIG,
    _GENERATION,
    _TEMPLATE,
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def export_tokenizer(files: ModelFiles, folder: Path, max_position: int) -> None:
    """Write everything that turns text into this model's tokens, and back.

    Args:
        files: of the model.
        folder: to write to; it must exist.
        max_position: the model's context, tokens.

    Raises:
        ModelError: the model has no tokenizer, or one that cannot be read.
        OSError: the folder is read-only or full.
    """
    tokenizer = Tokenizer.from_files(files.path)
    if files.kind == "folder":
        for name in _FILES:
            if (files.path / name).is_file():
                shutil.copyfile(files.path / name, folder / name)
        if (files.path / _TEMPLATES).is_dir():
            shutil.copytree(files.path / _TEMPLATES, folder / _TEMPLATES)
    else:
        tokenizer.backend.save(str(folder / TOKENIZER_JSON))
        _write_json(folder / _CONFIG, _config(tokenizer, max_position))
        _write_templates(tokenizer, folder)
    if not (folder / _GENERATION).exists():
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": [*tokenizer.eos_token_ids]}
        known = {key: value for key, value in ids.items() if value not in (None, [])}
        _write_json(folder / _GENERATION, known)


def _config(tokenizer: Tokenizer, max_position: int) -> dict[str, object]:
    found: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        **tokenizer.named_tokens,
    }
    if DEFAULT_TEMPLATE in tokenizer.chat_templates:  # older readers know no other place
        found["chat_template"] = tokenizer.chat_templates[DEFAULT_TEMPLATE]
    return found


def _write_templates(tokenizer: Tokenizer, folder: Path) -> None:
    for name, template in tokenizer.chat_templates.items():
        path = folder / _TEMPLATE
        if name != DEFAULT_TEMPLATE:
            (folder / _TEMPLATES).mkdir(exist_ok=True)
            path = folder / _TEMPLATES / f"{name}.jinja"
        path.write_text(template, encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
