"""Rebuilds a tokenizer from the metadata of a GGUF file.

A GGUF holds the vocabulary (`tokenizer.ggml.tokens`, in id order), a type per token, merges or scores,
ids of special tokens, and the *name* of the rule that cuts text into words before the merges
(`tokenizer.ggml.pre`). Two kinds are built: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").
A rule that is not known (gguf_words.py) is refused: another rule would give other ids without any error.
Not for: reading the file (models/gguf_header.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing

from paceline.api.gguf_words import WORD_RULES
from paceline.api.tokenizer_files import DEFAULT_TEMPLATE, TokenizerParts
from paceline.core.errors import ModelError
from paceline.models.gguf_header import GGUFValue

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification
_SPACE = "\u2581"  # SentencePiece's visible space

# Special tokens: the chat templates' name -> the metadata key.
_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # codespell:ignore (the specification's word)
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# Ids that end a text: end of text, end of turn, end of message.
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"


def read_gguf(metadata: Mapping[str, GGUFValue]) -> TokenizerParts:
    """Build the tokenizer that a GGUF file's metadata describes.

    Args:
        metadata: the file's key-value pairs.

    Raises:
        ModelError: there is no tokenizer in the file, its kind or its word rule is not supported, or
            its parts contradict one another.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = cast("Sequence[str]", _array(metadata, "tokens", str))
    special = _special_token_ids(metadata, len(tokens))
    if kind == _BYTE_LEVEL:
        backend, adds_bos = _byte_level(metadata, tokens)
    elif kind == _SENTENCEPIECE:
        backend, adds_bos = _sentencepiece(metadata, tokens, special), True
    else:
        msg = (
            f"cannot rebuild a tokenizer of kind {kind!r} (tokenizer.ggml.model); kinds that can be "
            f"rebuilt: {_BYTE_LEVEL!r} (byte-level BPE), {_SENTENCEPIECE!r} (SentencePiece BPE); use "
            "the model's folder in Hugging Face layout, with its tokenizer.json"
        )
        raise ModelError(msg)
    named = {name: tokens[special[key]] for name, key in _NAMED.items() if key in special}
    _add_tokens(backend, metadata, tokens, named)
    bos = named.get("bos_token") if _flag(metadata, "add_bos_token", adds_bos) else None
    eos = named.get("eos_token") if _flag(metadata, "add_eos_token", False) else None
    pieces = [piece for piece in (bos, "$A", eos) if piece is not None]
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=list(ids.items()))
    return TokenizerParts(
        backend=backend,
        named_tokens=named,
        bos_token_id=special.get(_NAMED["bos_token"]),
        eos_token_ids=tuple(dict.fromkeys(special[key] for key in _ENDS if key in special)),
        chat_templates=_chat_templates(metadata),
    )


def _byte_level(metadata: Mapping[str, GGUFValue], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning("the GGUF file names no word rule (tokenizer.ggml.pre); taking GPT-2's")
        name = "default"
    rule = WORD_RULES.get(str(name))
    if rule is None:
        msg = (
            f"cannot rebuild a tokenizer with word rule {name!r} (tokenizer.ggml.pre); known rules: "
            f"{', '.join(WORD_RULES)}; use the model's folder in Hugging Face layout, with its "
            "tokenizer.json"
        )
        raise ModelError(msg)
    lines = cast("Sequence[str]", _array(metadata, "merges", str))
    backend = Tokenizer(_bpe(tokens, _split(lines), ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    # add_space_prefix is SentencePiece's; llama.cpp and transformers ignore it for byte-level BPE.
    if rule.pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        words = pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _sentencepiece(
    metadata: Mapping[str, GGUFValue], tokens: Sequence[str], special: Mapping[str, int]
) -> Tokenizer:
    if "tokenizer.ggml.merges" in metadata:
        merges = _split(cast("Sequence[str]", _array(metadata, "merges", str)))
    else:
        scores = cast("Sequence[float]", _array(metadata, "scores", (int, float)))
        if len(scores) != len(tokens):
            msg = (
                f"cannot rebuild the tokenizer: {len(scores)} scores for {len(tokens)} tokens; each "
                "token has one score; download the GGUF file again"
            )
            raise ModelError(msg)
        merges = _merges_of_scores(tokens, scores)
    unknown = special.get(_NAMED["unk_token"])
    backend = Tokenizer(
        _bpe(
            tokens,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _flag(metadata, "add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises plain Exception
        msg = (
            f"cannot rebuild the tokenizer: {error}; every merge must join two tokens of the "
            "vocabulary into a third; download the GGUF file again"
        )
        raise ModelError(msg) from error


def _split(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE vocabulary implies.

    SentencePiece joins the adjacent pair whose result has the best score. As a list of merges: every
    cut of every token into two tokens, best score first. Among equal scores the longer left part
    comes first, then the longer right part, as transformers orders them.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(
    backend: Tokenizer,
    metadata: Mapping[str, GGUFValue],
    tokens: Sequence[str],
    named: Mapping[str, str],
) -> None:
    """Tokens that are matched whole in a text: control tokens (special) and user-defined ones."""
    key = "tokenizer.ggml.token_type"
    types = _array(metadata, "token_type", int) if key in metadata else []
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    special += [token for token in named.values() if token not in special]
    whole = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in whole])


def _special_token_ids(metadata: Mapping[str, GGUFValue], num_tokens: int) -> dict[str, int]:
    """Metadata key -> token id, checked against the vocabulary."""
    found = {key: metadata[key] for key in (*_NAMED.values(), *_ENDS) if key in metadata}
    ids = {key: value for key, value in found.items() if isinstance(value, int)}
    for key, token_id in ids.items():
        if not 0 <= token_id < num_tokens:
            msg = (
                f"cannot rebuild the tokenizer: {key} is {token_id}; ids 0 ... {num_tokens - 1} are "
                "possible; download the GGUF file again"
            )
            raise ModelError(msg)
    return ids


def _array(
    metadata: Mapping[str, GGUFValue], name: str, kind: type | tuple[type, ...]
) -> list[GGUFValue]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if isinstance(value, list) and value and all(isinstance(item, kind) for item in value):
        return value
    msg = (
        f"cannot rebuild the tokenizer: tokenizer.ggml.{name} is missing, empty or of a wrong type; a "
        "GGUF model file holds it (a file with only a projector or a vocabulary part may not); use "
        "the model's folder in Hugging Face layout, or another GGUF file"
    )
    raise ModelError(msg)


def _flag(metadata: Mapping[str, GGUFValue], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))


def _chat_templates(metadata: Mapping[str, GGUFValue]) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for further ones."""
    prefix = "tokenizer.chat_template"
    return {
        key[len(prefix) + 1 :] or DEFAULT_TEMPLATE: value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }
