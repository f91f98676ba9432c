"""What a tokenizer is made of, and how it is read from a folder in Hugging Face layout.

Files used, all but the first optional: `tokenizer.json` (the whole tokenizer), `tokenizer_config.json`
(names of the special tokens, added tokens, chat templates), `special_tokens_map.json` (names of the
special tokens in older folders), `chat_template.jinja` and `additional_chat_templates/*.jinja` (newer
folders), `generation_config.json` and `config.json` (end-of-text ids).
Not for: GGUF files (gguf_tokenizer.py) and what a tokenizer does (tokenizer.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from paceline.core.errors import ModelError

logger = logging.getLogger(__name__)

TOKENIZER_JSON = "tokenizer.json"
DEFAULT_TEMPLATE = "default"
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A tokenizer, whatever files it came from.

    `named_tokens` maps the names that chat templates know ("bos_token", "eos_token", ...) to the
    tokens' text. `eos_token_ids` ends a text; the tokenizer's own end-of-text token comes first.
    `chat_templates` maps a name ("default", "tool_use", ...) to Jinja source.
    """

    backend: tokenizers.Tokenizer
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_folder(folder: Path) -> TokenizerParts:
    """Read the tokenizer of a folder in Hugging Face layout.

    What surrounds a text is tokenizer.json's business; `add_bos_token` in the config is ignored, as
    transformers 5 ignores it where there is a tokenizer.json.

    Raises:
        ModelError: `tokenizer.json` is missing, a file is malformed, or an added token's id is not
            the one that the folder states.
    """
    backend = _read_backend(folder / TOKENIZER_JSON)
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config) or _named_tokens(_read_json(folder / "special_tokens_map.json"))
    _add_tokens(backend, config, named, folder)
    model = _read_json(folder / "config.json")
    bos = named.get("bos_token")
    bos_id = (
        backend.token_to_id(bos) if bos is not None else next(_ids(model, "bos_token_id"), None)
    )
    eos_ids = _eos_token_ids(backend, named, folder, model)
    return TokenizerParts(
        backend=backend,
        named_tokens=named,
        bos_token_id=bos_id,
        eos_token_ids=eos_ids,
        chat_templates=_chat_templates(folder, config),
    )


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        msg = (
            f"no tokenizer in {file.parent}: {TOKENIZER_JSON} is missing; a folder needs that file "
            "(a SentencePiece tokenizer.model alone is not enough); write it with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder), or use a GGUF file"
        )
        raise ModelError(msg)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        msg = (
            f"cannot read the tokenizer {file}: {error}; a file of the `tokenizers` library "
            f"(here version {tokenizers.__version__}) is needed; download it again or, if it was "
            "made by a newer version, update `tokenizers`"
        )
        raise ModelError(msg) from error
    backend.no_truncation()  # left in the file by training runs; a prompt is never cut silently
    backend.no_padding()
    return backend


def _read_json(file: Path) -> Json:
    """The object in a JSON file; empty if there is no such file."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        msg = f"cannot read {file}: {error}; a JSON object is needed; download the file again"
        raise ModelError(msg) from error
    if not isinstance(data, dict):
        msg = (
            f"cannot use {file}: it holds a {type(data).__name__}; a JSON object is needed; "
            "download the file again"
        )
        raise ModelError(msg)
    return data


def _token_text(value: object) -> str | None:
    """A token in a config file is a string or an object with its text under `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_tokens(config: Json) -> dict[str, str]:
    names = [f"{name}_token" for name in _NAMED_TOKENS]
    found = {name: _token_text(config.get(name)) for name in names}
    extra = config.get("extra_special_tokens")  # model-specific names: "image_token", ...
    if isinstance(extra, Mapping):
        found |= {str(name): _token_text(value) for name, value in extra.items()}
    return {name: token for name, token in found.items() if token is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Json, named: Mapping[str, str], folder: Path
) -> None:
    """Add the tokens that only `tokenizer_config.json` knows, and mark the named ones as special."""
    stated = config.get("added_tokens_decoder")
    known = backend.get_added_tokens_decoder()
    entries = stated.items() if isinstance(stated, Mapping) else ()
    for key, entry in sorted(entries, key=lambda item: int(item[0])):
        text = _token_text(entry)
        if text is None or int(key) in known or not isinstance(entry, Mapping):
            continue
        flags = {
            flag: bool(entry.get(flag, False))
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([tokenizers.AddedToken(text, **flags)])
        if backend.token_to_id(text) != int(key):
            msg = (
                f"cannot add token {text!r} of {folder / 'tokenizer_config.json'}: it would get id "
                f"{backend.token_to_id(text)}, the file says {key}; both files must agree; "
                f"take {TOKENIZER_JSON} and tokenizer_config.json from the same source"
            )
            raise ModelError(msg)
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    for text in named.values():
        if text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens(
                [tokenizers.AddedToken(text, normalized=False, special=True)]
            )


def _ids(config: Json, key: str) -> Iterator[int]:
    """A token id or a list of them."""
    value = config.get(key)
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item


def _eos_token_ids(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], folder: Path, model: Json
) -> tuple[int, ...]:
    """End-of-text ids: the tokenizer's, then generation_config.json's, else config.json's."""
    own = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    generation = _read_json(folder / "generation_config.json")
    listed = list(_ids(generation, "eos_token_id")) or list(_ids(model, "eos_token_id"))
    ids = ([] if own is None else [own]) + listed
    return tuple(dict.fromkeys(ids))


def _chat_templates(folder: Path, config: Json) -> dict[str, str]:
    """Templates by name; files of their own win over the config."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates[DEFAULT_TEMPLATE] = stated
    elif isinstance(stated, list):
        for entry in stated:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("template"), str):
                msg = (
                    f"cannot use chat_template in {folder / 'tokenizer_config.json'}: an entry is "
                    f"{entry!r}; a string or a list of objects with `name` and `template` is "
                    "possible; correct the file"
                )
                raise ModelError(msg)
            templates[str(entry.get("name", DEFAULT_TEMPLATE))] = str(entry["template"])
    files = {DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                msg = f"cannot read {file}: {error}; UTF-8 text is needed; download the file again"
                raise ModelError(msg) from error
    return templates
