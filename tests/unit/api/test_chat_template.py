"""Chat templates, against transformers' rendering of the same source."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import RequestError, TemplateError
from tests import tiny_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|head|>ipython\\n\\n" + (message.content | tojson) }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant\\n\\n' }}
{%- endif %}
"""
LISTS = """{%- for message in messages %}
{%- if message.content is string %}
[{{ message.role }}]{{ message.content }}
{%- else %}
[{{ message.role }}]
{%- for part in message.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}
{%- endif %}
{%- endfor %}
"""
CONTROL = """{% set ns = namespace(count=0, last='') %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
  line {{ loop.index }}: {{ message.content }}
{% endfor %}
{% generation %}{% set inner = 'in' %}{{ ns.count }}{{ inner }}{% endgeneration %}{{ inner is defined }}
{{ messages | length }} {{ pad_token is defined }} {{ eos_token }}
"""
TOOLS = """{% if tools %}
{{ tools | tojson(indent=2) }}
{{ tools[0] | tojson(separators=(',', ':'), sort_keys=true) }}
{% endif %}
{% for m in messages %}
{{ m.content | default('none') | tojson }}{% if m.tool_calls %}{{ m.tool_calls | tojson(ensure_ascii=true) }}{% endif %}
{{ m.reasoning_content }}{{ m.thinking }}{{ m.name }}
{% endfor %}
{{ mood }}{{ flags.a[1] }}
"""
USER = {"role": "user", "content": "  Hi <b>&'\"</b> 👋 \n"}
ASSISTANT = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief. "}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, {"role": "tool", "content": '{"é": 1}'}],
)
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}


def with_template(source: str | None, **more: str) -> Tokenizer:
    changes = {"tokenizer.chat_template": source}
    changes |= {f"tokenizer.chat_template.{name}": text for name, text in more.items()}
    return tiny_tokenizers.byte_level(**changes)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    folder = tiny_tokenizers.write_folder(tmp_path_factory.mktemp("oracle") / "m")
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, LISTS, CONTROL, TOOLS])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(
    theirs: Any, source: str, messages: list[Any], prompt: bool
) -> None:
    """Every feature that templates use renders as it does in transformers."""
    variables = {"mood": "calm", "flags": {"a": [1, 2.5, None, True]}}
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **variables
    )
    text = with_template(source).chat_text(messages, add_generation_prompt=prompt, **variables)
    assert text == expected


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": TOOL["function"]}]},
        {"role": "assistant", "content": "x", "reasoning": "because <é>", "name": None},
        {"role": "assistant", "content": "x", "thinking": "hm", "name": "n"},
    ],
)
def test_tools_and_reasoning_equal_transformers(theirs: Any, message: dict[str, Any]) -> None:
    """Tool lists, tool calls, missing values and the names of reasoning arrive alike."""
    messages = [USER, message]
    variables: dict[str, Any] = {"mood": "x", "flags": {"a": [0, "é"]}, "tools": [TOOL]}
    expected = theirs.apply_chat_template(
        messages, chat_template=TOOLS, tokenize=False, **variables
    )
    text = with_template(TOOLS).chat_text(messages, add_generation_prompt=False, **variables)
    assert text == expected
    assert messages == [USER, message]


def test_parts_go_to_templates_that_walk_lists(theirs: Any) -> None:
    """A template made for lists of parts gets the list."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        USER,
    ]
    expected = theirs.apply_chat_template(messages, chat_template=LISTS, tokenize=False)
    assert with_template(LISTS).chat_text(messages, add_generation_prompt=False) == expected
    assert "<a><b>" in expected


@pytest.mark.parametrize(
    "source", [CHATML, CHATML.replace("m['content']", "m['content'] | string")]
)
def test_parts_become_text_elsewhere(source: str) -> None:
    """A template made for strings gets the parts as lines, never Python's idea of a list."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = with_template(source).chat_text([{"role": "user", "content": parts}])
    assert text == "<|user|>one\ntwo\n<|assistant|>"


def test_the_date_is_today() -> None:
    """Templates may print the date."""
    today = dt.datetime.now().strftime("%Y")  # noqa: DTZ005
    assert with_template("{{ strftime_now('%Y') }}").chat_text([USER]) == today


def test_bos_is_never_doubled() -> None:
    """A template that writes the first token and a tokenizer that adds it make one, not two."""
    adding = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": LLAMA3}
    tokenizer = tiny_tokenizers.byte_level(**adding)
    assert tokenizer.encode("x")[0] == 0
    ids = tokenizer.encode_chat([USER])
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.chat_text([USER])


def test_named_templates_are_chosen() -> None:
    """Tools pick the tool template; a name or a source picks itself."""
    tokenizer = with_template("plain", tool_use="tools")
    assert tokenizer.chat_text([USER]) == "plain"
    assert tokenizer.chat_text([USER], tools=[TOOL]) == "tools"
    assert tokenizer.chat_text([USER], tools=[]) == "plain"
    assert tokenizer.chat_text([USER], template="tool_use") == "tools"
    assert tokenizer.chat_text([USER], template="{{ messages[0].role }}") == "user"


def test_roles_that_the_template_names_are_known() -> None:
    """Models have roles of their own; a template that compares with one knows it."""
    message = {"role": "ipython", "content": "1"}
    assert "ipython" in with_template(LLAMA3).chat_text([USER, message])
    with pytest.raises(TemplateError, match="unknown role 'ipython'"):
        with_template(CHATML).chat_text([USER, message])


@pytest.mark.parametrize(
    "messages,says",
    [
        ([], "without messages"),
        ("hello", "chat from a str"),
        ({"role": "user", "content": "x"}, "chat from a dict"),
        ([USER, "hello"], "message 1 is a str"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "wizard", "content": "x"}], "unknown role 'wizard'; known roles: system"),
        ([{"role": 3, "content": "x"}], "unknown role 3"),
        ([USER, {"role": "user"}], r"message 1 \(user\) has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "content of type 'int'"),
        ([{"role": "user", "content": ["x"]}], "content of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "type 'text' without `text`"),
        ([{"role": "user", "content": "x", "extra": object()}], "message 0 holds a object"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, says: str) -> None:
    """A malformed chat is the request's mistake: what is wrong, what is possible, what to do."""
    with pytest.raises(TemplateError, match=says) as caught:
        with_template(CHATML).chat_text(messages)
    assert isinstance(caught.value, RequestError)
    assert str(caught.value).count(";") >= 1


@pytest.mark.parametrize(
    "source,says",
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "raised TemplateError: roles must alternate",
        ),
        ("{{ messages[0].content + 1 }}", "raised TypeError"),
        ("{{ missing.field }}", "raised UndefinedError"),
        ("{% for %}", "does not parse"),
        ("{% nonsense %}", "does not parse"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "raised SecurityError"),
        ("{{ messages.append(1) }}", "raised SecurityError"),
        ("{% for i in range(1000000) %}{% endfor %}", "raised OverflowError"),
    ],
)
def test_a_template_that_raises_is_reported(source: str, says: str) -> None:
    """A foreign program's failure, or its attempt to leave the sandbox, is one request's error."""
    with pytest.raises(TemplateError, match=says):
        with_template(source).chat_text([USER])


def test_a_model_without_a_template_says_so() -> None:
    """Chat with a base model: the error names the ways out."""
    with pytest.raises(TemplateError, match=r"no chat template; .*generate\(\)"):
        with_template(None).chat_text([USER])


def test_unknown_template_names_are_listed() -> None:
    """A wrong name lists the names there are; without a default one must be named."""
    with pytest.raises(TemplateError, match=r"named 'tool'; its templates: default, tool_use"):
        with_template("a", tool_use="b").chat_text([USER], template="tool")
    tokenizer = with_template(None, rag="r")
    with pytest.raises(TemplateError, match=r"none is named 'default'; its templates: rag"):
        tokenizer.chat_text([USER])
    assert tokenizer.chat_text([USER], template="rag") == "r"


def test_odd_variables_are_refused() -> None:
    """Only plain data reaches a template: an object's methods are not its business."""
    with pytest.raises(TemplateError, match="template variable 'file' holds a PosixPath"):
        with_template(CHATML).chat_text([USER], file=Path("x"))
