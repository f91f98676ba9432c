"""Answers made by the target through the engine, in batches as large as it has rows.

A job is a prompt from a file, or one that the target makes itself: what it samples after the bare
opening of a user's turn, up to the end of that turn, goes through the chat template like any other
prompt. A run may give openings of its own ("Summarize the following article:"), by turns; such a prompt
is cut at a length drawn for it. Held-out prompts are answered at temperature 0, as they are measured.

At the end of the time allowed, answers in the making are kept as far as they came (a longest answer is
cut no differently), except held-out ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import RequestError
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.train.prepare import ChatTokenizer, is_held_out, user_turn_header
from paceline.train.shards import Doc

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.train.jobs import Job, JobList
    from paceline.train.progress import Progress
    from paceline.train.settings import TrainSettings
    from paceline.train.shards import Shards, ShardWriter

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 60.0
_LEAST_TOKENS = 8  # of an answer that time cut off, and of a prompt of the target's own
_LEAST_PASSAGE = 32  # tokens that a prompt with an opening may have at least
_WAVE = 16  # rows are filled when a sixteenth of them is free: prefills are few and large
OWN_GROUP = "own"


@dataclass(slots=True)
class Counts:
    """What became of the jobs of this call."""

    answers: int = 0
    tokens: int = 0
    own_prompts: int = 0
    own_refused: int = 0
    failed: int = 0
    seconds: float = 0.0

    def describe(self) -> str:
        """In words."""
        rate = self.tokens / max(self.seconds, 1e-9)
        return (
            f"{self.answers} answers, {self.tokens} answer tokens, {rate:,.0f} a second; "
            f"{self.own_prompts} prompts of the target's own, {self.own_refused} more refused; "
            f"{self.failed} failed"
        )


@dataclass(slots=True)
class _Open:
    """A request in the engine."""

    job: Job
    prompt_ids: Sequence[int]
    held_out: bool
    group: str
    makes_prompt: bool
    opening: str = ""  # what a prompt of the target's own was made to begin with
    token_ids: list[int] = field(default_factory=list)


class Generator:
    """Feeds the engine and stores what comes back.

    Args:
        engine: without a drafter.
        tokenizer: the target's.
        prompts: prepared prompts.
        writer: where answers go.
        settings: of the run.
        done: numbers of the jobs that are stored already.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        prompts: Shards,
        writer: ShardWriter,
        settings: TrainSettings,
        done: frozenset[int],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._writer = writer
        self._settings = settings
        self._done = done
        self._stops = frozenset(tokenizer.eos_token_ids) | frozenset(
            engine.model_config.eos_token_ids
        )
        self._header = user_turn_header(tokenizer) if settings.own_share > 0 else []
        self._chat_frame = tokenizer.encode_chat([{"role": "user", "content": ""}])
        self._open: dict[str, _Open] = {}
        self._ready: deque[tuple[Job, list[int], bool, str]] = deque()  # prompts made, not asked
        self.counts = Counts()

    def run(self, jobs: JobList, goal: int, deadline: float | None, progress: Progress) -> None:
        """Generate until `goal` answer tokens are stored in this call, or until the deadline.

        Args:
            jobs: what to do.
            goal: answer tokens.
            deadline: `time.perf_counter()` seconds; None: no limit.
            progress: told of every step now and then.

        Raises:
            OSError: the disk is full; what was flushed before is kept.
        """
        started = shown = flushed = time.perf_counter()
        fresh = (job for job in jobs if job.index not in self._done)
        try:
            while self.counts.tokens < goal and (
                deadline is None or time.perf_counter() < deadline
            ):
                self._feed(fresh)
                if not self._engine.has_work:
                    break
                for out in self._engine.step():
                    self._take(out.request_id, out.token_ids, out.finish_reason, out.error)
                now = time.perf_counter()
                self.counts.seconds = now - started
                if now - shown > 1.0:
                    shown = now
                    progress("generate", self.counts.tokens, goal, self.counts.describe())
                if now - flushed > _FLUSH_SECONDS:
                    flushed = now
                    self._writer.flush()
            self._keep_unfinished()
        finally:
            self._writer.flush()
        progress("generate", self.counts.tokens, goal, self.counts.describe())

    def _feed(self, jobs: Iterator[Job]) -> None:
        """Fill the engine's rows in waves.

        A prefill costs a step whatever its size, and decoding rows wait for it; one after every
        step, for the few rows that have just ended, would cost a third of the speed.
        """
        rows = self._engine.config.cache.max_rows
        if rows - len(self._open) < max(rows // _WAVE, 1):
            return
        while len(self._open) < rows:
            if self._ready:
                self._ask(*self._ready.popleft())
                continue
            job = next(jobs, None)
            if job is None:
                return
            if job.prompt is None:
                self._ask_for_prompt(job)
            else:
                record = self._prompts.docs[job.prompt]
                ids = self._prompts.tokens(job.prompt).tolist()
                self._ask(job, ids, bool(record["held_out"]), record["group"].decode())

    def _ask_for_prompt(self, job: Job) -> None:
        openings = self._settings.openings
        opening = openings[job.seed % len(openings)]
        header = self._header + (
            self._tokenizer.encode(opening, add_special_tokens=False) if opening else []
        )
        room = self._settings.max_prompt_tokens - len(self._chat_frame) - len(header)
        if opening:  # passages of all lengths; a cut one is a passage still
            room = min(room, _LEAST_PASSAGE + job.seed // len(openings) % max(room, 1))
        self._add(
            f"{job.index}/prompt",
            _Open(
                job=job,
                prompt_ids=header,
                held_out=False,
                group=OWN_GROUP,
                makes_prompt=True,
                opening=opening,
            ),
            SamplingParams(
                max_tokens=max(room, 1), temperature=self._settings.own_temperature, seed=job.seed
            ),
        )

    def _ask(self, job: Job, prompt_ids: Sequence[int], held_out: bool, group: str) -> None:
        temperature = 0.0 if held_out else job.temperature
        self._add(
            str(job.index),
            _Open(
                job=job, prompt_ids=prompt_ids, held_out=held_out, group=group, makes_prompt=False
            ),
            SamplingParams(
                max_tokens=self._settings.max_new_tokens, temperature=temperature, seed=job.seed
            ),
        )

    def _add(self, name: str, entry: _Open, params: SamplingParams) -> None:
        try:
            self._engine.add(
                Request(id=name, prompt_ids=entry.prompt_ids, params=params, stop_ids=self._stops)
            )
        except RequestError as error:
            self.counts.failed += 1
            log.warning("job %s was refused: %s", name, error)
            return
        self._open[name] = entry

    def _take(
        self,
        name: str,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        error: str | None,
    ) -> None:
        entry = self._open[name]
        entry.token_ids += token_ids
        if reason is None:
            return
        del self._open[name]
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.counts.failed += 1
            log.warning("job %s ended with %s: %s", name, reason, error)
        elif entry.makes_prompt:
            self._take_prompt(entry, ended=reason is FinishReason.STOP)
        else:
            self._store(entry)

    def _take_prompt(self, entry: _Open, *, ended: bool) -> None:
        """Send a prompt that the target made through the chat template, if it is a good one."""
        text = ""
        if ended or entry.opening:
            text = (entry.opening + self._tokenizer.decode(entry.token_ids)).strip()
        ids = self._tokenizer.encode_chat([{"role": "user", "content": text}]) if text else []
        least = len(self._header) + _LEAST_TOKENS
        if not least <= len(ids) <= self._settings.max_prompt_tokens:
            self.counts.own_refused += 1
            return
        self.counts.own_prompts += 1
        held_out = is_held_out(ids, self._settings.held_out)
        self._ready.append((entry.job, ids, held_out, entry.group))

    def _store(self, entry: _Open) -> None:
        self._writer.add(
            Doc(
                token_ids=[*entry.prompt_ids, *entry.token_ids],
                num_prompt=len(entry.prompt_ids),
                temperature=0.0 if entry.held_out else entry.job.temperature,
                held_out=entry.held_out,
                job=entry.job.index,
                group=entry.group,
            )
        )
        self.counts.answers += 1
        self.counts.tokens += len(entry.token_ids)

    def _keep_unfinished(self) -> None:
        for name, entry in list(self._open.items()):
            self._engine.abort(name)
            long = len(entry.token_ids) >= _LEAST_TOKENS
            if long and not entry.held_out and not entry.makes_prompt:
                self._store(entry)
        self._open.clear()
        while self._engine.has_work:
            self._engine.step()
