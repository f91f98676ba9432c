"""The environment in which a model's chat template runs: foreign code that has to come to an end.

Jinja's immutable sandbox keeps a template away from what is none of its business. This keeps it from
running for ever: turns of loops and calls of macros are counted, computing time is limited, and neither
the output nor what `+`, `*`, `**` and `~` make may grow beyond a bound. To count, the parsed template is
rewritten: loops draw through a counter, and bodies of loops and macros begin with a tick.

Not for: a single call that takes long or fills the memory by itself (a padding of a billion characters);
only a process of its own could be stopped there. What templates are offered is in chat_template.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TURNS = 5_000_000  # a thousand messages, each compared with each, are one million
MOST_SECONDS = 10.0  # of this thread's computing; a template takes milliseconds
MOST_TEXT = 1 << 25  # characters, or entries of a list: several times the longest context windows
MOST_BITS = 1 << 16  # of a whole number
_CHECK_EVERY = 16  # turns between two looks at the clock
# Names that no template can spell.
_BUDGET, _TICK, _COUNTED, _JOINED = "the budget", "the tick", "counted turns", "joined text"


class TemplateBudgetError(Exception):
    """A template asked for more than any template needs; the message says of what."""


class Budget:
    """What one rendering has left."""

    def __init__(self) -> None:
        self._turns = 0
        self._text = 0
        self._deadline = time.thread_time() + MOST_SECONDS

    def turn(self, text: int = 0) -> None:
        """Count a turn of a loop or a call of a macro, with `text` characters written in it."""
        self._turns += 1
        if self._turns > MOST_TURNS:
            msg = f"its loops and macros take more than {MOST_TURNS:,} turns"
            raise TemplateBudgetError(msg)
        if self._turns % _CHECK_EVERY == 0 and time.thread_time() > self._deadline:
            msg = f"it computes for more than {MOST_SECONDS:g} seconds"
            raise TemplateBudgetError(msg)
        self.write(text)

    def write(self, text: int) -> None:
        """Count characters of output, those of macros where they are made and where they are used."""
        self._text += text
        _check_size(self._text)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget: render with `bounded(variables)`."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        self.filters |= {_TICK: _tick, _COUNTED: _counted, _JOINED: _joined}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and rewrite what has to be counted."""
        tree = super()._parse(source, name, filename)
        for body in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            block = cast("nodes.For | nodes.Macro | nodes.CallBlock", body)
            if isinstance(block, nodes.For):
                block.iter = _filtered(block.iter, _COUNTED)
            written = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
            tick = _filtered(nodes.Const(written, lineno=block.lineno), _TICK)
            block.body.insert(0, nodes.ExprStmt(tick, lineno=block.lineno))
        for concat in tree.find_all(nodes.Concat):
            parts = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [_filtered(parts, _JOINED)]
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Add, multiply and raise within bounds."""
        if operator == "+":
            _check_size(_size(left) + _size(right))
        elif operator == "*":
            _check_size(max(_size(left) * _count(right), _size(right) * _count(left)))
            _check_bits(_bits(left) + _bits(right))
        else:
            _check_bits(_bits(left) * _count(right))
        return super().call_binop(context, operator, left, right)


def bounded(variables: Mapping[str, object]) -> dict[str, object]:
    """Variables for one rendering, with a budget of its own."""
    return {**variables, _BUDGET: Budget()}


def _budget(context: Context) -> Budget:
    found = context.parent[_BUDGET]
    assert isinstance(found, Budget), "templates are rendered with bounded(variables)"
    return found


def _filtered(value: nodes.Node, name: str) -> nodes.Filter:
    """`value | name`: the compiler looks a filter up, so no variable of a template can replace it."""
    return nodes.Filter(cast("nodes.Expr", value), name, [], [], None, None, lineno=value.lineno)


@pass_context
def _tick(context: Context, written: int) -> None:
    _budget(context).turn(written)


@pass_context
def _finalize(context: Context, value: object) -> str:
    """What stands between braces becomes output here."""
    text = value if isinstance(value, str) else str(value)
    _budget(context).write(len(text))
    return text


class _Counted:
    """What a loop walks over. Each entry drawn is a turn, also where the loop's `if` drops it."""

    def __init__(self, values: Iterable[object], budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[object]:
        for value in self._values:
            self._budget.turn()
            yield value

    def __len__(self) -> int:
        if not isinstance(self._values, Sized):
            msg = "a stream has no length"
            raise TypeError(msg)
        return len(self._values)


@pass_context
def _counted(context: Context, values: Iterable[object]) -> _Counted:
    return _Counted(values, _budget(context))


def _joined(parts: list[object]) -> str:
    """`a ~ b ~ ...`."""
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MOST_TEXT:
        msg = f"it makes a text or list of more than {MOST_TEXT:,} characters or entries"
        raise TemplateBudgetError(msg)


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        msg = f"it computes with whole numbers of more than {MOST_BITS:,} bits"
        raise TemplateBudgetError(msg)


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0
