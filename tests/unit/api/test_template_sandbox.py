"""Foreign templates come to an end; those that behave notice nothing."""

from __future__ import annotations

import time

import pytest

from paceline.api import template_sandbox as sandbox
from paceline.api.chat_template import render
from paceline.core.errors import TemplateError

HELLO = [{"role": "user", "content": "hello"}]


def rendered(source: str, **variables: object) -> str:
    return render(source, HELLO, add_generation_prompt=True, variables=variables)


MANY = "range(100000)"
TURNS = {
    "nested loops": f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    "a loop whose condition drops all": (
        f"{{% for a in {MANY} %}}{{% for b in {MANY} if false %}}{{% endfor %}}{{% endfor %}}"
    ),
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}"
    ),
    "a loop that walks itself": (
        "{% for a in [1, 2] recursive %}{% if loop.depth < 40 %}{{ loop([1, 2]) }}{% endif %}"
        "{% endfor %}"
    ),
    "a block that is called twice": (
        "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro m(n) %}{% if n %}{% call twice() %}{{ m(n - 1) }}{% endcall %}{% endif %}"
        "{% endmacro %}{{ m(30) }}"
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_loops_without_an_end_are_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets an error that says what was too much, in a moment."""
    monkeypatch.setattr(sandbox, "MOST_TURNS", 20_000)
    with pytest.raises(TemplateError, match=r"does not come to an end: .* 20,000 turns.*another"):
        rendered(TURNS[name])


def test_the_real_limit_is_reached_in_seconds() -> None:
    """Ten billion turns would take an hour."""
    started = time.thread_time()
    with pytest.raises(TemplateError, match="does not come to an end"):
        rendered(TURNS["nested loops"])
    assert time.thread_time() - started < 2 * sandbox.MOST_SECONDS


def test_few_turns_that_take_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn sorts a long list: the clock ends it long before the count does."""
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.2)
    slow = f"{{% for a in {MANY} %}}{{% set b = {MANY} | sort | list %}}{{% endfor %}}"
    with pytest.raises(TemplateError, match=r"computes for more than 0\.2 seconds"):
        rendered(slow)


SIZES = {
    "output of a loop": "{% for a in range(1000) %}{{ messages[0].content * 100 }}{% endfor %}",
    "text of a loop": "{% for a in range(1000) %}" + "x" * 100 + "{% endfor %}",
    "a macro's output": (
        "{% macro m() %}{% for a in range(1000) %}" + "x" * 100 + "{% endfor %}{% endmacro %}"
        "{% set b = m() %}"
    ),
    "doubling by +": (
        "{% set n = namespace(s='xx') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "doubling by ~": (
        "{% set n = namespace(s='xx') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "a doubled list": (
        "{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "a product": "{{ 'x' * 10000000000 }}",
    "a product the other way round": "{{ 10000000000 * [1] }}",
}


@pytest.mark.parametrize("name", SIZES)
def test_texts_without_an_end_are_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, whoever collects it, and what operators make on the way there."""
    monkeypatch.setattr(sandbox, "MOST_TEXT", 50_000)
    with pytest.raises(TemplateError, match="more than 50,000 characters or entries"):
        rendered(SIZES[name])


@pytest.mark.parametrize("power", ["10 ** (10 ** 10)", "(2 ** 60000) * (2 ** 60000)"])
def test_numbers_without_an_end_are_ended(power: str) -> None:
    """A power can take longer than the universe in one operation."""
    with pytest.raises(TemplateError, match="whole numbers"):
        rendered(f"{{% set a = {power} %}}")


def test_what_loops_know_of_themselves_is_as_ever() -> None:
    """Counting must not show: lengths, neighbours, else branches, unpacking, streams."""
    source = (
        "{% for a, b in items %}{{ loop.index }}/{{ loop.length }}{{ a ~ b ~ 1 }}"
        "{{ ',' if not loop.last }}{{ loop.nextitem is defined }} {% endfor %}"
        "{% for a in [] %}x{% else %}none {% endfor %}"
        "{% for a in missing %}x{% endfor %}"
        "{% for a in items | map('first') %}{{ a }}{{ loop.revindex }}{% endfor %}"
        "{% for k in {'q': 1} %}{{ k }}{% endfor %}"
        "{{ none }}{{ missing }}{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ [1] + [2] }}"
    )
    assert rendered(source, items=[["x", "y"], ["z", "w"]]) == (
        "1/2xy1,True 2/2zw1False none x2z1qNone1024abab[1, 2]"
    )


def test_a_loop_over_nothing_countable_fails_as_before() -> None:
    """The error is the one that names the template's mistake."""
    with pytest.raises(TemplateError, match="raised TypeError: 'int' object is not iterable"):
        rendered("{% for a in 5 %}{% endfor %}")


def test_each_rendering_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that is used all day must not run out of turns in the evening."""
    monkeypatch.setattr(sandbox, "MOST_TURNS", 100)
    source = "{% for a in range(30) %}{{ a % 10 }}{% endfor %}"
    for _ in range(10):
        assert rendered(source) == "0123456789" * 3


def test_a_long_conversation_is_far_from_the_limits() -> None:
    """Templates that look at all messages for each message are common."""
    messages = [{"role": "user", "content": "x" * 50}] * 1000
    source = "{% for m in messages %}{% for o in messages %}{% endfor %}{{ m.content }}{% endfor %}"
    text = render(source, messages, add_generation_prompt=False, variables={})
    assert len(text) == 50_000
