"""The bodies of POST /tokenize and POST /detokenize, in vLLM's shape; llama.cpp's names too."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from paceline.api.server.protocol import Fields, Items, Messages, TokenId, renamed


class TokenizeRequest(Fields):
    """A text, or a conversation, whose tokens are asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, data: object) -> object:
        aliases = {
            "content": "prompt",
            "add_special": "add_special_tokens",
            "with_pieces": "return_token_strs",
        }
        return renamed(data, aliases)


class DetokenizeRequest(Fields):
    """Token ids whose text is asked for."""

    model: str | None = None
    tokens: Items[TokenId]
