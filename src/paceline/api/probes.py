"""The prompts that a drafter network is tested on before it serves: built in, in the model's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.prompts import BUILT_IN, DEMO
from paceline.core.errors import TemplateError
from paceline.engine.fitness import Probes

if TYPE_CHECKING:
    from paceline.api.tokenizer import Tokenizer

TEXTS = tuple(dict.fromkeys((DEMO, *BUILT_IN)))


def probes_of(tokenizer: Tokenizer) -> Probes:
    """The built-in prompts: through the chat template, or as they are for a model without one."""
    try:
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in TEXTS]
    except TemplateError:
        prompts = [tokenizer.encode_prompt(text) for text in TEXTS]
    return Probes(prompts=prompts, stop_ids=frozenset(tokenizer.eos_token_ids))
