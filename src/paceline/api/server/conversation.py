"""Turns a request's messages into the prompt that the model's chat template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.api.prompts import template_variables
from paceline.api.server.errors import api_error, bad
from paceline.core.errors import RequestError, TemplateError

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.server.plan import Plan
    from paceline.api.server.protocol_chat import ChatRequest
    from paceline.api.tokenizer import Tokenizer

# Marks the end of the message to be continued; private characters, so no template trims them.
_END = "\ue0f0paceline\ue0f1"
_THINKING = "enable_thinking"
_TAKEN = frozenset({"self", "template"})  # arguments of `chat_text`


def rendered(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    variables: Mapping[str, object] | None = None,
    kwargs: Mapping[str, object] | None = None,
) -> str:
    """The text of a conversation.

    Args:
        messages: with role and content, as OpenAI has them.
        tokenizer: the model's, with its templates.
        add_generation_prompt: end with the opening of an assistant's message; None: yes, unless the
            last message is continued.
        continue_final_message: end within the last message, so that the answer goes on with it.
        variables: the server's own for the template, such as tools.
        kwargs: the request's (chat_template_kwargs).

    Raises:
        ApiError: 400; the two ends are asked for together, or the template refuses the messages.
    """
    if continue_final_message and add_generation_prompt:
        msg = (
            "add_generation_prompt opens a new message and continue_final_message goes on with the "
            "last; one of them is possible; choose one"
        )
        raise bad(msg, "continue_final_message")
    opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    try:
        asked = template_variables(kwargs)
    except TemplateError as error:
        raise api_error(error, param="chat_template_kwargs") from error
    taken = sorted(_TAKEN & asked.keys())
    if taken:
        msg = (
            f"chat_template_kwargs sets {', '.join(taken)}; all other names are possible; rename it"
        )
        raise bad(msg, "chat_template_kwargs")
    given = {**(variables or {}), **asked}
    shown = [*messages[:-1], _marked(messages[-1])] if continue_final_message else messages
    try:
        text = tokenizer.chat_text(shown, add_generation_prompt=opens, **given)
    except RequestError as error:
        raise api_error(error, param="messages") from error
    if not continue_final_message:
        return text
    end = text.rfind(_END)
    if end < 0:
        msg = (
            "the model's chat template does not show the last message as it is, so it cannot be "
            "continued; leave continue_final_message out"
        )
        raise bad(msg, "continue_final_message")
    return text[:end]


def prompt_of(body: ChatRequest, plan: Plan, tokenizer: Tokenizer) -> str:
    """The text that the model goes on with when it answers a request.

    Args:
        body: the request.
        plan: what its tools and reasoning ask for.
        tokenizer: the model's, with its templates.

    Raises:
        ApiError: 400, see `rendered` and `effort_variables`.
    """
    return rendered(
        plan.messages,
        tokenizer,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables={**plan.variables, **effort_variables(body.reasoning_effort, tokenizer)},
        kwargs=body.chat_template_kwargs,
    )


def effort_variables(effort: str | None, tokenizer: Tokenizer) -> dict[str, object]:
    """What `reasoning_effort` means to the model's template.

    Templates that know the name are given it; for those that can only switch reasoning off, "none"
    does so.

    Raises:
        ApiError: 400; the template knows neither.
    """
    if effort is None:
        return {}
    sources = tokenizer.chat_templates.values()
    if any("reasoning_effort" in source for source in sources):
        return {"reasoning_effort": effort}
    if any(_THINKING in source for source in sources):
        if effort == "none":
            return {_THINKING: False}
        msg = (
            'reasoning_effort: this model\'s reasoning can only be switched off; "none" is '
            "possible; leave it out otherwise"
        )
        raise bad(msg, "reasoning_effort")
    msg = "reasoning_effort: this model's chat template knows no such setting; leave it out"
    raise bad(msg, "reasoning_effort")


def _marked(message: Message) -> Message:
    """The message to be continued, with a mark at its end."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "\n".join(str(text) for text in texts)
    if not isinstance(content, str):
        msg = (
            "continue_final_message: the last message has no text to go on with; give it a "
            "`content` of text, or leave the option out"
        )
        raise bad(msg, "continue_final_message")
    return {**message, "content": content + _END}
