from __future__ import annotations

import pytest

from paceline.api.server.conversation import effort_variables, rendered
from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import TokenizerParts
from tests import tiny
from tests.served import TOKENIZER, refusal

USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "well, "}
ASKS = "<|im_start|>user\nhi<|im_end|>\n"
TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }};{% endfor %}"


def with_template(template: str) -> Tokenizer:
    return Tokenizer(
        TokenizerParts(
            backend=tiny.tiny_tokenizer(),
            named_tokens={},
            eos_token_ids=(2,),
            chat_templates={"default": template},
        )
    )


def test_a_prompt_opens_the_answer() -> None:
    """Unless the client says that it does not."""
    assert rendered([USER], TOKENIZER) == f"{ASKS}<|im_start|>assistant\n"
    assert rendered([USER], TOKENIZER, add_generation_prompt=False) == ASKS


def test_the_last_message_can_be_continued() -> None:
    """The prompt ends where the message does, white space included."""
    prompt = rendered([USER, BEGUN], TOKENIZER, continue_final_message=True)
    assert prompt == f"{ASKS}<|im_start|>assistant\nwell, "


def test_a_template_that_trims_does_not_change_what_is_continued() -> None:
    """The space at the end of a begun sentence decides about its next token."""
    prompt = rendered([USER, BEGUN], with_template(TRIMS), continue_final_message=True)
    assert prompt == "[user]hi;[assistant]well, "


def test_parts_can_be_continued() -> None:
    """A list of parts of text is a text."""
    parts = {"role": "assistant", "content": [{"type": "text", "text": "we"}]}
    prompt = rendered([USER, parts], TOKENIZER, continue_final_message=True)
    assert prompt.endswith("assistant\nwe")


@pytest.mark.parametrize(
    "messages,options,param",
    [
        (
            [USER, BEGUN],
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            [{"role": "assistant", "tool_calls": []}],
            {"continue_final_message": True},
            "continue_final_message",
        ),
        ([USER], {"kwargs": {"messages": []}}, "chat_template_kwargs"),
        ([USER], {"kwargs": {"template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ([USER], {"kwargs": {"self": 1}}, "chat_template_kwargs"),
        (["hi"], {}, "messages"),
    ],
)
def test_what_cannot_be_rendered_is_refused(messages, options, param) -> None:
    """A variable may not stand in for an argument, least of all for the template."""
    error = refusal(rendered, messages, TOKENIZER, **options)
    assert (error.status, error.param) == (400, param)


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    """The answer would go on with something else."""
    hides = with_template("{% for m in messages %}{{ m.role }}{% endfor %}")
    error = refusal(rendered, [USER, BEGUN], hides, continue_final_message=True)
    assert error.param == "continue_final_message"


def test_variables_reach_the_template() -> None:
    """Whatever its author has named."""
    template = with_template("{{ mood }}{{ tools | length }}")
    text = rendered([USER], template, variables={"tools": [1]}, kwargs={"mood": "calm"})
    assert text == "calm1"


def test_effort_means_what_the_template_knows() -> None:
    """Nothing is dropped in silence: a model without such a setting refuses it."""
    knows = with_template("{{ reasoning_effort }}")
    switches = with_template("{% if enable_thinking %}x{% endif %}")
    assert effort_variables(None, TOKENIZER) == {}
    assert effort_variables("low", knows) == {"reasoning_effort": "low"}
    assert effort_variables("none", switches) == {"enable_thinking": False}
    assert refusal(effort_variables, "low", switches).param == "reasoning_effort"
    assert refusal(effort_variables, "none", TOKENIZER).param == "reasoning_effort"
