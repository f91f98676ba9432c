"""Tokens of a text and text of tokens, and the cards of what is served: the small answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.api.server.conversation import prompt_of
from paceline.api.server.errors import api_error, bad
from paceline.api.server.plan import PLAIN, Planner
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_refused import check_fields
from paceline.api.server.sampling import check_ids
from paceline.core.errors import RequestError

if TYPE_CHECKING:
    from paceline.api.server.chat import ChatCall
    from paceline.api.server.context import Context
    from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest

_ENDS = ("add_generation_prompt", "continue_final_message")


def tokenize(
    body: TokenizeRequest, context: Context, *, planner: Planner = PLAIN
) -> dict[str, Any]:
    """Tokens of a text, or of a conversation as the model sees it.

    Args:
        body: the request.
        context: what is served.
        planner: knows the model's tools and reasoning.

    Raises:
        ApiError: 400 or 404; neither or both are given, or it is not valid.
    """
    check_fields(body, strict=context.strict)
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        msg = "give `prompt` (text) or `messages` (a conversation); one of them is possible"
        raise bad(msg, "prompt")
    text, special = body.prompt, body.add_special_tokens is not False
    if body.messages is not None:
        text, special = _conversation(body, context, planner), bool(body.add_special_tokens)
    assert text is not None, "one of the two is given"
    try:
        ids = context.tokenizer.encode(text, add_special_tokens=special)
    except RequestError as error:
        raise api_error(error, param="prompt") from error
    found: dict[str, Any] = {"count": len(ids), "max_model_len": context.max_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [context.tokenizer.token_text(token_id) for token_id in ids]
    return found


def _conversation(body: TokenizeRequest, context: Context, planner: Planner) -> str:
    assert body.messages is not None, "messages are given"
    if not body.messages:
        msg = "messages is empty; at least one message is needed; add one"
        raise bad(msg, "messages")
    fields = ("messages", "tools", "chat_template_kwargs", *_ENDS)
    asked = ChatRequest.model_construct(**{name: getattr(body, name) for name in fields})
    return prompt_of(asked, planner.plan(asked, context.compiler), context.tokenizer)


def rendered(call: ChatCall) -> dict[str, Any]:
    """What a chat request gives the model, whose answer is not made.

    `prompt` is the conversation through the template; `prompt_token_ids` are what would be computed,
    fewer where truncate_prompt_tokens cuts them.
    """
    (ids,) = call.job.prompts
    return {
        "object": "chat.completion.render",
        "model": call.context.model,
        "prompt": call.prompt,
        "prompt_token_ids": list(ids),
        "count": len(ids),
        "max_tokens": call.job.params.max_tokens,
        "max_model_len": call.context.max_len,
    }


def detokenize(body: DetokenizeRequest, context: Context) -> dict[str, Any]:
    """Text of tokens, special ones included; under vLLM's name and llama.cpp's.

    Raises:
        ApiError: 400 or 404; an id is not in the vocabulary.
    """
    check_fields(body, strict=context.strict)
    context.check_model(body.model)
    check_ids("tokens", body.tokens, context.vocab_size)
    text = context.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}


def model_list(context: Context) -> dict[str, Any]:
    """All names under which the model is served."""
    return {"object": "list", "data": [_card(name, context) for name in context.model_names]}


def model_card(name: str, context: Context) -> dict[str, Any]:
    """One name's card.

    Raises:
        ApiError: 404; nothing is served under it.
    """
    context.check_model(name)
    return _card(name, context)


def _card(name: str, context: Context) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "paceline",
        "root": context.model,
        "parent": None,
        "max_model_len": context.max_len,
    }
