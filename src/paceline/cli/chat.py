"""`paceline chat`: a conversation through the model's chat template, or with a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.console import read_prompt
from paceline.cli.flags import parse_json_object, with_flags
from paceline.cli.generate import answer, loaded, remark, stream_text
from paceline.cli.talk import Turn, talk
from paceline.core import environment
from paceline.core.config import EngineConfig
from paceline.core.errors import ConfigError, RequestError
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.llm import LLM


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
    url: Annotated[
        str | None,
        Parameter(
            help="talk with this OpenAI-compatible server (http://HOST:PORT) in place of a model "
            "loaded here; --model is the model's name there, by default the first that it lists"
        ),
    ] = None,
    api_key: Annotated[
        str | None, Parameter(help="of the server; default: the variable OPENAI_API_KEY")
    ] = None,
    extra_body: Annotated[
        str | None,
        Parameter(
            help="JSON object: more of every request to the server, for example "
            '\'{"speculative": {"enabled": false}}\''
        ),
    ] = None,
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
    if url is None and (api_key is not None or extra_body is not None):
        msg = "--api-key and --extra-body are for a server, and none is named; add --url"
        raise ConfigError(msg)
    extra = {} if extra_body is None else parse_json_object(extra_body, "--extra-body")
    talks = message is None and sys.stdin is not None and sys.stdin.isatty()
    text = "" if talks else read_prompt(message)
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    shows_remarks = sys.stderr.isatty() if stats is None else stats
    if url is not None:
        from paceline.cli.chat_url import Remote, chat_at, check_engine_flags, sampling_body

        check_engine_flags(config)
        model = None if config.model == EngineConfig().model else config.model
        key = api_key if api_key is not None else environment.openai_key()
        remote = Remote(url, model, key, {**sampling_body(params), **extra})
        return chat_at(
            remote,
            None if talks else text,
            opening,
            as_json=as_json,
            shows_remarks=shows_remarks,
        )
    with loaded(config) as llm:
        if talks:
            return talk(
                lambda messages: _turn(llm, messages, params),
                opening,
                shows_remarks=shows_remarks,
                survives=RequestError,
            )
        prompt_ids = llm.tokenizer.encode_chat([*opening, {"role": "user", "content": text}])
        return answer(llm, prompt_ids, params, as_json=as_json, stats=stats)


def _turn(llm: LLM, messages: Sequence[Message], params: SamplingParams) -> Turn:
    result = stream_text(llm, llm.tokenizer.encode_chat(messages), params)
    return Turn(text=result.text, remark=remark(result))
