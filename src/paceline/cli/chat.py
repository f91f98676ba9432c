"""`paceline chat`: a conversation through the model's chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.console import complain, notes, read_prompt
from paceline.cli.flags import with_flags
from paceline.cli.generate import answer, loaded, remark, stream_text
from paceline.core.config import EngineConfig
from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.llm import LLM

_WELCOME = "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@with_flags
def chat(
    message: Annotated[
        str | None,
        Parameter(
            help="answer this and end; '-': what stands on standard input; none: talk, on a terminal"
        ),
    ] = None,
    /,
    *,
    params: SamplingParams,
    config: EngineConfig,
    system: Annotated[str | None, Parameter(help="system message")] = None,
    as_json: Annotated[
        bool,
        Parameter(name="--json", negative="", help="one JSON object per answer instead of text"),
    ] = False,
    stats: Annotated[
        bool | None,
        Parameter(help="remarks on speed and accept length; default: if stderr is a terminal"),
    ] = None,
) -> int:
    """Talk with the model, or have one message answered."""
    talks = message is None and sys.stdin is not None and sys.stdin.isatty()
    text = "" if talks else read_prompt(message)
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    with loaded(config) as llm:
        if talks:
            return _talk(llm, opening, params, stats=stats)
        prompt_ids = llm.tokenizer.encode_chat([*opening, {"role": "user", "content": text}])
        return answer(llm, prompt_ids, params, as_json=as_json, stats=stats)


def _talk(llm: LLM, opening: list[Message], params: SamplingParams, *, stats: bool | None) -> int:
    """Take turns until the user ends it. A turn that cannot be served is not kept."""
    shows_stats = sys.stderr.isatty() if stats is None else stats
    notes().print(_WELCOME, style="dim")
    messages = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        if line == "/exit":
            return 0
        if line == "/reset":
            messages = list(opening)
            continue
        if not line:
            continue
        asked: Message = {"role": "user", "content": line}
        try:
            result = stream_text(llm, llm.tokenizer.encode_chat([*messages, asked]), params)
        except RequestError as error:
            complain(f"{error} (/reset starts anew)")
            continue
        except KeyboardInterrupt:
            complain("stopped; this turn is not kept")
            continue
        messages += [asked, {"role": "assistant", "content": result.text}]
        if shows_stats:
            notes().print(remark(result), style="dim")
