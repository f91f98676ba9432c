"""A tokenizer that knows every byte, some words and whatever special tokens a test wants; no tests here."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import TokenizerParts

EOS = "<|im_end|>"
_MERGES = (("Ġ", "{"), ('"', ":"), ("n", "a"), ("na", "m"), ("nam", "e"), ("}", "}"), ("{", '"'))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    special: Sequence[str] = (), *, plain: Sequence[str] = (), template: str | None = CHATML
) -> Tokenizer:
    """A byte-level BPE; id 2 ends a text.

    Args:
        special: further special tokens.
        plain: added tokens that are no special ones, such as Qwen's `<think>`.
        template: the chat template.
    """
    specials = ["<unk>", "<|im_start|>", EOS, *special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*specials, *plain, *alphabet, *(a + b for a, b in _MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in specials])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            named_tokens={"eos_token": EOS},
            eos_token_ids=(2,),
            chat_templates={} if template is None else {"default": template},
        )
    )
