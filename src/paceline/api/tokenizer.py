"""Text to token ids and back, and chats to token ids, for a model's own tokenizer.

A thin layer over the `tokenizers` library: no network, no `transformers`, no state that changes, so
one tokenizer serves any number of threads and requests.
Not for: text that arrives bit by bit (text_stream.py), reading files (tokenizer_files.py,
gguf_tokenizer.py), rendering (chat_template.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from paceline.api import chat_template
from paceline.api.chat_template import Message
from paceline.api.gguf_tokenizer import read_gguf
from paceline.api.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TOKENIZER_JSON,
    TokenizerParts,
    read_folder,
)
from paceline.core.errors import ModelError, RequestError, TemplateError
from paceline.models.gguf_header import read_gguf_metadata

_TOOL_TEMPLATE = "tool_use"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's visible space


class Tokenizer:
    """The text side of a model.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work; not to be changed.
        bos_token_id: the beginning-of-text id, or None.
        eos_token_ids: every id that ends a text, the tokenizer's own first; may be empty.
        chat_templates: Jinja sources by name; empty for a model without one.
        named_tokens: text of the special tokens by the names that templates use ("bos_token", ...).
        special_ids: ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend = parts.backend
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.chat_templates = dict(parts.chat_templates)
        self.named_tokens = dict(parts.named_tokens)
        self._added = {
            token_id: token.content
            for token_id, token in self.backend.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(
            token_id
            for token_id, token in self.backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._spelling = _spelling(self.backend)

    @classmethod
    def from_files(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a model's tokenizer.

        Args:
            path: a folder in Hugging Face layout, its tokenizer.json, or a GGUF file.

        Raises:
            ModelError: there is no tokenizer there, or it is malformed or of an unsupported kind.
        """
        path = Path(path)
        if path.is_dir():
            return cls(read_folder(path))
        if not path.is_file():
            msg = (
                f"no tokenizer at {path}: there is no such folder or file; a folder with a "
                f"{TOKENIZER_JSON} or a GGUF file is possible; check the path"
            )
            raise ModelError(msg)
        if path.name == TOKENIZER_JSON:
            return cls(read_folder(path.parent))
        return cls(read_gguf(read_gguf_metadata(path)))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens spelled out in it become their ids.

        Args:
            text: any text without unpaired surrogates.
            add_special_tokens: add what the model's tokenizer puts around a text, such as its
                beginning-of-text token.

        Raises:
            RequestError: `text` is no string, or is not valid Unicode.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            msg = (
                f"cannot turn this {type(text).__name__} into tokens; a string of valid Unicode is "
                "possible, so no unpaired surrogates; decode or clean it first, for example with "
                'text.encode("utf-8", "replace").decode()'
            )
            raise RequestError(msg) from error

    def encode_prompt(self, text: str) -> list[int]:
        """Return `encode(text)`, refusing a prompt that holds no token.

        Raises:
            RequestError: the prompt is empty (or not valid, see `encode`).
        """
        ids = self.encode(text)
        if not ids:
            msg = (
                f"the prompt {text!r} encodes to no tokens; at least one token is needed to start "
                "from; pass some text or use chat(), which adds the model's own"
            )
            raise RequestError(msg)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids; those beyond the vocabulary (a model's padding) have no text.
            skip_special_tokens: leave special tokens out.

        Raises:
            RequestError: an id is negative or does not fit 32 bits.
        """
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            bad = next(token_id for token_id in ids if not 0 <= token_id < 1 << 32)
            msg = (
                f"cannot decode token id {bad}; ids 0 ... {self.vocab_size - 1} are possible; check "
                "where the ids come from"
            )
            raise RequestError(msg) from error

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; empty for an id without a token.

        Joined over an answer's ids they are its UTF-8 text, special tokens included.
        """
        token = self._added.get(token_id)
        if token is not None:
            return token.encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling == "bytes":
            return b"".join(_BYTES.get(char) or char.encode() for char in token)
        if self._spelling == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for showing logprobs; bytes that are no UTF-8: U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: object,
    ) -> str:
        """Render a conversation with the model's chat template.

        Args:
            messages: objects with `role` and `content` (a string or a list of text parts).
            add_generation_prompt: end with the opening of an assistant's message.
            template: the name of one of the model's templates, or Jinja source; None: the model's
                own choice ("tool_use" if there is one and tools are given, else "default").
            variables: further variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            TemplateError: the model has no template, the messages are malformed, a role is unknown,
                or the template raised.
        """
        source = self._template(template, has_tools=bool(variables.get("tools")))
        return chat_template.render(
            source,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**self.named_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: object,
    ) -> list[int]:
        """Return the ids of a rendered conversation (arguments and errors: `chat_text`).

        The template writes the beginning-of-text token where the model wants one, so none is added.
        """
        text = self.chat_text(
            messages,
            add_generation_prompt=add_generation_prompt,
            template=template,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    def _template(self, wanted: str | None, *, has_tools: bool) -> str:
        names = self.chat_templates
        if wanted is not None:
            if wanted not in names and "{" not in wanted:
                known = ", ".join(names) or "none"
                msg = (
                    f"the model has no chat template named {wanted!r}; its templates: {known}; pass "
                    "one of these names, or Jinja source"
                )
                raise TemplateError(msg)
            return names.get(wanted, wanted)
        if has_tools and _TOOL_TEMPLATE in names:
            return names[_TOOL_TEMPLATE]
        if DEFAULT_TEMPLATE in names:
            return names[DEFAULT_TEMPLATE]
        if names:
            msg = (
                f"the model has several chat templates and none is named {DEFAULT_TEMPLATE!r}; its "
                f"templates: {', '.join(names)}; pass one of these names as `template`"
            )
        else:
            msg = (
                "the model has no chat template; plain prompts are possible with it; use generate(), "
                "an instruction-tuned model, or pass a template (Jinja source)"
            )
        raise TemplateError(msg)


def _spelling(backend: tokenizers.Tokenizer) -> str:
    """How the vocabulary spells bytes: "bytes" (GPT-2's alphabet), "sentencepiece" or "other"."""
    state = backend.decoder.__getstate__() if backend.decoder is not None else b"{}"
    decoder = json.loads(state)
    steps = decoder.get("decoders", [decoder])
    kinds = {str(step.get("type")) for step in steps}
    if "ByteLevel" in kinds:
        return "bytes"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    return "other"


def _byte_alphabet() -> Mapping[str, bytes]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
