"""A conversation on a terminal, whoever answers: a model loaded here, or a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cli.console import complain, notes, remark_on
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.api.chat_template import Message

_WELCOME = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"
_HELP = """\
/help           this list
/clear, /reset  forget the conversation and start anew
/quit, /exit    end; so does Ctrl-D
Ctrl-C stops an answer, and at the prompt it ends the program.
A line that begins with a space is sent as it is, also if it looks like a command."""
_COMMAND = re.compile(r"/\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer that has been shown."""

    text: str
    remark: str  # on how it was made


def talk(
    ask: Callable[[Sequence[Message]], Turn],
    opening: Sequence[Message],
    *,
    shows_remarks: bool,
    survives: type[PacelineError],
) -> int:
    """Take turns until the user ends it. A turn that cannot be served is not kept.

    Args:
        ask: answers a conversation, on stdout.
        opening: what every conversation begins with.
        shows_remarks: whether remarks are shown.
        survives: errors of `ask` that end a turn and not the conversation.
    """
    notes().print(_WELCOME, style="dim")
    messages = list(opening)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        command = line.rstrip()
        if _COMMAND.fullmatch(command):
            if command in {"/quit", "/exit"}:
                return 0
            if command in {"/clear", "/reset"}:
                messages = list(opening)
            elif command == "/help":
                notes().print(_HELP, style="dim", markup=False)
            else:
                complain(f"no command {command}; /help lists them")
            continue
        text = line.strip()
        if not text:
            continue
        asked: Message = {"role": "user", "content": text}
        try:
            turn = ask([*messages, asked])
        except survives as error:
            complain(f"{error} (this turn is not kept; /clear starts anew)")
            continue
        except KeyboardInterrupt:
            complain("stopped; this turn is not kept")
            continue
        messages += [asked, {"role": "assistant", "content": turn.text}]
        if shows_remarks:
            remark_on(turn.remark)
