"""`paceline chat --url`: a conversation with any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from paceline.api.options import engine_config, options
from paceline.bench.serve_client import Answer, Endpoint, ask, served_models
from paceline.bench.serve_http import Address, HttpClient
from paceline.cli.console import harmless, notes, remark_on, say
from paceline.cli.talk import Turn, talk
from paceline.core.config import EngineConfig
from paceline.core.errors import ConfigError, PacelineError, RequestError
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.chat_template import Message

_ENDPOINT: Endpoint = "chat"
_ALWAYS = ("temperature", "top_p", "max_tokens")  # what a server would choose by itself
_NOT_SENT = ("banned_token_ids", "n", "logprobs")
_CONNECT_S = 30.0


class Remote:
    """A server's chat: one model, the same sampling for every answer.

    Args:
        url: the server.
        model: its name there; None: the first that the server lists.
        api_key: sent as a bearer token.
        body: more of every request.

    Raises:
        ConfigError: the URL is none.
        PacelineError: the server cannot be reached, or lists no models.
    """

    def __init__(
        self, url: str, model: str | None, api_key: str | None, body: Mapping[str, object]
    ) -> None:
        self._address = Address.parse(url)
        self._key = api_key
        self._body = body
        self._model = model or str(asyncio.run(self._first_model()))

    async def _first_model(self) -> object:
        async with HttpClient(self._address, api_key=self._key, timeout=_CONNECT_S) as client:
            return (await served_models(client))[0]["id"]

    def answer(self, messages: Sequence[Message], show: _Show | None) -> Answer:
        """Have a conversation answered.

        Args:
            messages: the conversation.
            show: writes the answer as it comes; None: nothing is written.

        Raises:
            RequestError: the server refuses the request.
            PacelineError: there is no whole answer.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._body,
        }
        kept = {key: value for key, value in body.items() if value is not None}
        data = json.dumps(kept, ensure_ascii=False).encode()
        try:
            answer = asyncio.run(self._ask(data, show))
        finally:  # also after Ctrl-C: what stands there stays, on whole lines
            if show is not None:
                show.end()
        failure = answer.failure
        if failure is not None:
            refused = failure.kind.startswith("HTTP 4")
            msg = f"the server answers with {failure.kind}: {failure.message}"
            raise RequestError(msg) if refused else PacelineError(msg)
        return answer

    async def _ask(self, data: bytes, show: _Show | None) -> Answer:
        async with HttpClient(self._address, api_key=self._key, timeout=None) as client:
            return await ask(client, _ENDPOINT, data, show)


class _Show:
    """Writes text to stdout, and reasoning, which is not part of the answer, to stderr."""

    def __init__(self, *, thoughts: bool) -> None:
        self._thoughts = thoughts
        self._console = notes()
        self._last = ""
        self._thinks = False

    def __call__(self, text: str, reasoning: str) -> None:
        if reasoning and self._thoughts:
            shown = harmless(reasoning, sys.stderr)
            self._console.print(shown, style="dim", end="", markup=False)
            self._thinks = True
        if text:
            self._end_thought()
            say(text)
            self._last = text

    def _end_thought(self) -> None:
        if self._thinks:
            self._console.print()
            self._thinks = False

    def end(self) -> None:
        """End the line, if one has begun."""
        self._end_thought()
        if self._last and not self._last.endswith("\n"):
            say("\n")
        self._last = ""


def chat_at(
    remote: Remote,
    text: str | None,
    opening: Sequence[Message],
    *,
    as_json: bool,
    shows_remarks: bool,
) -> int:
    """Answer one message, or talk.

    Args:
        remote: answers.
        text: the message; None: talk.
        opening: what the conversation begins with.
        as_json: one JSON object in place of the text of a single answer.
        shows_remarks: whether remarks and reasoning are shown.

    Raises:
        RequestError: the server refuses the message.
        PacelineError: there is no whole answer.
    """
    if text is None:
        return talk(
            lambda messages: _turn(remote, messages, shows_remarks=shows_remarks),
            opening,
            shows_remarks=shows_remarks,
            survives=PacelineError,
        )
    messages: list[Message] = [*opening, {"role": "user", "content": text}]
    show = None if as_json else _Show(thoughts=shows_remarks)
    answer = remote.answer(messages, show)
    if as_json:
        say(json.dumps(_as_dict(answer), ensure_ascii=False) + "\n")
    if shows_remarks:
        remark_on(remark(answer))
    return 0


def _turn(remote: Remote, messages: Sequence[Message], *, shows_remarks: bool) -> Turn:
    answer = remote.answer(messages, _Show(thoughts=shows_remarks))
    return Turn(text=answer.text, remark=remark(answer))


def remark(answer: Answer) -> str:
    """One line on how an answer was made, of what the server tells."""
    parts = []
    if answer.output_tokens is not None:
        parts.append(f"{answer.output_tokens} tokens")
    if answer.tpot:
        parts.append(f"{1 / answer.tpot:.1f} tok/s")
    if answer.ttft is not None:
        parts.append(f"first after {1e3 * answer.ttft:.0f} ms")
    told = answer.speculation
    if told is not None and told.accept_length is not None:
        parts.append(f"accept length {told.accept_length:.2f} over {told.num_steps} steps")
    elif told is not None:
        parts.append(f"{told.num_accepted} of {told.num_drafted} drafted tokens accepted")
    if answer.prompt_tokens is not None:
        cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens is not None else ""
        parts.append(f"{answer.prompt_tokens} prompt tokens{cached}")
    return ", ".join([*parts, f"finish {answer.finish_reason}"])


def _as_dict(answer: Answer) -> dict[str, object]:
    told = answer.speculation
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "num_output_tokens": answer.output_tokens,
        "num_prompt_tokens": answer.prompt_tokens,
        "num_cached_tokens": answer.cached_tokens,
        "ttft_s": None if answer.ttft is None else round(answer.ttft, 6),
        "e2e_s": None if answer.e2e is None else round(answer.e2e, 6),
        "accept_length": None if told is None else told.accept_length,
        "num_steps": None if told is None else told.num_steps,
        "num_drafted": None if told is None else told.num_drafted,
        "num_accepted": None if told is None else told.num_accepted,
    }


def sampling_body(params: SamplingParams) -> dict[str, object]:
    """Sampling parameters under their names on the wire; defaults are left out where servers share them.

    Raises:
        ConfigError: one that such a chat cannot have.
    """
    plain = SamplingParams()
    changed = {
        f.name: getattr(params, f.name)
        for f in fields(params)
        if getattr(params, f.name) != getattr(plain, f.name)
    }
    lame = [f"--{name.replace('_', '-')}" for name in _NOT_SENT if name in changed]
    if lame:
        msg = f"{', '.join(lame)} cannot be asked of a server by this command; leave it out"
        raise ConfigError(msg)
    body = {**{name: getattr(params, name) for name in _ALWAYS}, **changed}
    return {
        name: {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value
        for name, value in body.items()
    }


def check_engine_flags(config: EngineConfig) -> None:
    """Refuse flags of an engine, which a server has set for itself.

    Raises:
        ConfigError: one was given.
    """
    plain = engine_config({})
    given = []
    for option in options().values():
        one, other = (
            getattr(whole if option.part == "engine" else getattr(whole, option.part), option.field)
            for whole in (config, plain)
        )
        if one != other and option.name != "model":
            given.append(option.name)
    if given:
        msg = (
            f"options of a model that is loaded here were given with --url: {', '.join(given)}; the "
            "server has its own: leave them out, or ask for a request's own with --extra-body"
        )
        raise ConfigError(msg)
