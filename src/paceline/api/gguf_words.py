"""How a byte-level BPE tokenizer cuts text into words before the merges, by the name in a GGUF file.

The definition is what transformers rebuilds from the same file, and tests compare with it. Three
additions bring the ids nearer to the model family's own tokenizer: Llama 3 and Tekken take a word that
is itself a token whole, whatever the merges say (`ignore_merges`); Qwen2 normalises to NFC; Llama 3
adds its beginning-of-text token unless the file says no.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_UPPER, _TEKKEN_LOWER = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """How text is cut before the merges. `pattern` None: GPT-2's, which `tokenizers` builds in."""

    pattern: str | None = None
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say


_GPT2_RULE = WordRule()
_LLAMA3_RULE = WordRule(pattern=_LLAMA3, ignore_merges=True, adds_bos=True)
_QWEN2_RULE = WordRule(pattern=_QWEN2, nfc=True)

# Names in `tokenizer.ggml.pre`. "smollm" follows transformers, which cuts as GPT-2 does; SmolLM's own
# tokenizer and llama.cpp also isolate each digit first. The merges hold no digit, so ids differ only
# where two or more spaces stand before a digit (2 of Spec-Bench's 560 turns).
WORD_RULES: Mapping[str, WordRule] = {
    "default": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "smollm": _GPT2_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "tekken": WordRule(pattern=_TEKKEN, ignore_merges=True, adds_bos=True),
}
