"""One answer of an OpenAI-compatible server, with the times at which it came.

Tokens are counted by the server (`usage`) and by nobody else: a chunk may hold half a token or a
whole accepted block. What a chunk's time says is called a chunk gap, whatever others call it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from paceline.bench.serve_connection import ExchangeError
from paceline.bench.serve_http import HttpClient
from paceline.bench.serve_sse import EventDecoder
from paceline.core.errors import PacelineError

Endpoint = Literal["chat", "completions"]
PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Fields of a chat delta that hold something generated: for the reader, thoughts, and the rest.
_TEXTS = ("content", "refusal")
_THOUGHTS = ("reasoning_content", "reasoning")  # some servers send both, with the same text
_OTHERS = ("tool_calls", "function_call")
Listener = Callable[[str, str], None]  # (text, reasoning): what a chunk adds to either
_MOST_SHOWN = 300  # characters of a server's message
_MOST_KEPT = 1 << 20  # bytes of a body that is no stream
_FAILED = frozenset(("abort", "aborted", "error"))
BAD_DATA = "bad data"
CUT_SHORT = "cut short"
NO_STREAM = "no stream"
IN_STREAM = "error in the stream"
ENDED_BADLY = "ended by the server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an answer is none: a kind for counting ("HTTP 503", "timeout", ...), and what was said."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a server says about one answer's speculation.

    `num_steps` is None where it does not tell (llama.cpp's `timings`).
    """

    num_steps: int | None
    num_drafted: int
    num_accepted: int

    @property
    def accept_length(self) -> float | None:
        """1 + accepted / steps: tokens per verify step, bonus included."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, or its failure. Times are seconds since the request was sent."""

    started: float  # time.perf_counter
    ttft: float | None = None  # to the first content; None: there was none
    e2e: float | None = None  # to the last chunk that says anything about the answer
    gaps: Sequence[float] = ()  # between chunks with content
    text: str = ""
    reasoning: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # by `usage`; None: the server does not tell
    finish_reason: str | None = None
    speculation: Speculation | None = None
    failure: Failure | None = None

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1), seconds; None without usage, or below two tokens."""
        if self.ttft is None or self.e2e is None or (self.output_tokens or 0) < 2:
            return None
        return (self.e2e - self.ttft) / (cast("int", self.output_tokens) - 1)


class AnswerReader:
    """Reads a streamed answer of either endpoint; a `Sink` for `HttpClient.send`.

    Args:
        on_text: told every piece of text and reasoning at once.
    """

    def __init__(self, on_text: Listener | None = None) -> None:
        self.started = time.perf_counter()
        self._on_text = on_text
        self._decoder = EventDecoder()
        self._status = 0
        self._streams = False
        self._done = False  # [DONE] has come
        self._body = bytearray()  # of what is no stream
        self._first: float | None = None
        self._last: float | None = None  # of content
        self._end: float | None = None
        self._gaps: list[float] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._speculation: Speculation | None = None
        self._failure: Failure | None = None

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Sink`."""
        self._status = status
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._streams = status == 200 and kind == "text/event-stream"

    def feed(self, at: float, data: bytes) -> None:
        """See `Sink`."""
        if not self._streams:
            if len(self._body) < _MOST_KEPT:
                self._body += data
            return
        for event in self._decoder.feed(data):
            self._take(at, event.name, event.data)

    def answer(self, error: ExchangeError | None = None) -> Answer:
        """The answer, once the exchange has ended, or its failure.

        Args:
            error: what ended the exchange, if it is not complete.
        """
        if error is None and self._streams and self._failure is None:
            for event in self._decoder.finish():
                self._take(time.perf_counter(), event.name, event.data)
        details = self._usage.get("prompt_tokens_details")
        return Answer(
            started=self.started,
            ttft=None if self._first is None else self._first - self.started,
            e2e=None if self._end is None else self._end - self.started,
            gaps=tuple(self._gaps),
            text="".join(self._texts),
            reasoning="".join(self._thoughts),
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            cached_tokens=_count(details.get("cached_tokens"))
            if isinstance(details, dict)
            else None,
            output_tokens=_count(self._usage.get("completion_tokens")),
            finish_reason=self._finish,
            speculation=self._speculation,
            failure=self._why_failed(error),
        )

    def _why_failed(self, error: ExchangeError | None) -> Failure | None:
        if self._failure is not None:
            return self._failure
        if error is not None and not (self._done and self._finish):
            return Failure(kind=error.kind, message=str(error))
        said = _error_message(self._body.decode("utf-8", errors="replace"))
        if self._status != 200:
            return Failure(kind=f"HTTP {self._status}", message=said)
        if not self._streams:
            return Failure(kind=NO_STREAM, message=f"the answer is no event stream: {said}")
        if self._finish is None and not self._done:
            told = "the stream ended without a finish_reason and without [DONE]"
            return Failure(kind=CUT_SHORT, message=told)
        if self._finish in _FAILED:
            return Failure(kind=ENDED_BADLY, message=f"finish_reason is {self._finish!r}")
        return None

    def _take(self, at: float, name: str, data: str) -> None:
        if self._done or self._failure is not None:
            return
        if data.strip() == "[DONE]":
            self._done = True
            return
        try:
            chunk = json.loads(data)
            if name == "error" or chunk.get("error"):
                self._failure = Failure(kind=IN_STREAM, message=_error_message(data))
                return
            self._take_chunk(at, chunk)
        except (ValueError, TypeError, AttributeError, RecursionError):
            shown = data if len(data) <= _MOST_SHOWN else data[:_MOST_SHOWN] + "..."
            self._failure = Failure(kind=BAD_DATA, message=f"no chunk of an answer: {shown}")

    def _take_chunk(self, at: float, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices") or ():
            self._end = at
            if choice.get("finish_reason") is not None:
                self._finish = str(choice["finish_reason"])
            text, thought, other = _content(choice)
            if not text and not thought and not other:
                continue
            if self._first is None:
                self._first = at
            if self._last is not None:
                self._gaps.append(at - self._last)
            self._last = at
            self._texts.append(text)
            self._thoughts.append(thought)
            if self._on_text is not None:
                self._on_text(text, thought)
        if chunk.get("usage"):
            self._usage = dict(chunk["usage"])
        self._speculation = _speculation(chunk) or self._speculation


def _content(choice: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Text and reasoning of a choice in a chunk, and whether it holds anything else generated."""
    if "delta" not in choice:
        return "" + (choice.get("text") or ""), "", False
    delta = choice["delta"] or {}
    text = "".join(delta.get(name) or "" for name in _TEXTS)
    thought = "" + next((delta[name] for name in _THOUGHTS if delta.get(name)), "")
    return text, thought, any(delta.get(name) for name in _OTHERS)


def _speculation(chunk: Mapping[str, Any]) -> Speculation | None:
    """vLLM's `metrics.speculative_decoding`, or what llama.cpp's `timings` say."""
    told = (chunk.get("metrics") or {}).get("speculative_decoding")
    if told:
        return Speculation(
            num_steps=int(told["num_spec_steps"]) if "num_spec_steps" in told else None,
            num_drafted=int(told.get("num_draft_tokens", 0)),
            num_accepted=int(told.get("num_accepted_draft_tokens", 0)),
        )
    timings = chunk.get("timings") or {}
    if "draft_n" not in timings:
        return None
    return Speculation(
        num_steps=None,
        num_drafted=int(timings["draft_n"]),
        num_accepted=int(timings.get("draft_n_accepted", 0)),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _error_message(body: str) -> str:
    """What a server says in an error, in whichever of the usual forms."""
    said: object = body
    try:
        given = json.loads(body)
        said = given.get("error", given) if isinstance(given, dict) else given
        if isinstance(said, dict):
            said = said.get("message") or said.get("detail") or said
    except (ValueError, RecursionError):
        pass
    text = " ".join((said if isinstance(said, str) else json.dumps(said)).split())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


async def ask(
    client: HttpClient,
    endpoint: Endpoint,
    body: bytes,
    on_text: Listener | None = None,
) -> Answer:
    """Send one streamed request and read its answer; failures are part of what is returned.

    The clock starts before a connection is made, if none is open: a user waits for that too.
    """
    reader = AnswerReader(on_text)
    try:
        await client.send("POST", PATHS[endpoint], body, reader)
    except ExchangeError as error:
        return reader.answer(error)
    return reader.answer()


async def served_models(client: HttpClient) -> list[Mapping[str, Any]]:
    """The server's model cards.

    Raises:
        ExchangeError: it cannot be reached.
        PacelineError: it lists none.
    """
    body = await client.get("/v1/models")
    said = f"status {body.status}: {_error_message(body.text)}"
    try:
        cards = [c for c in json.loads(body.text)["data"] if isinstance(c["id"], str)]
    except (ValueError, KeyError, TypeError, RecursionError):
        cards = []
    if body.status == 401:
        msg = (
            f"the server was asked for its models (/v1/models) and wants a key: {said}; give one with "
            "--api-key, or in the variable OPENAI_API_KEY"
        )
        raise PacelineError(msg)
    if body.status != 200 or not cards:
        msg = (
            f"the server was asked for its models (/v1/models) and named none: {said}; name the model "
            "with --model, or check that the URL is that of an OpenAI-compatible server"
        )
        raise PacelineError(msg)
    return cards
