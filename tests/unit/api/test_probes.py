"""What a drafter is tested on before it serves."""

from __future__ import annotations

from paceline.api.probes import TEXTS, probes_of
from paceline.api.tokenizer import Tokenizer


def test_the_built_in_prompts_as_users_would_ask_them(tiny_checkpoint) -> None:
    """Through the chat template, each once; answers end where the model's do."""
    tokens = Tokenizer.from_files(tiny_checkpoint("llama"))
    assert len(TEXTS) == len(set(TEXTS)) >= 4
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokens.chat_templates = {"default": template}
    found = probes_of(tokens)
    assert found.prompts == [tokens.encode(f"[{text}]", add_special_tokens=False) for text in TEXTS]
    assert found.stop_ids == frozenset(tokens.eos_token_ids) != frozenset()


def test_a_model_without_a_chat_template_gets_them_as_they_are(tiny_checkpoint) -> None:
    """A base model goes on with the text."""
    tokens = Tokenizer.from_files(tiny_checkpoint("llama"))
    tokens.chat_templates = {}
    assert probes_of(tokens).prompts == [tokens.encode_prompt(text) for text in TEXTS]
