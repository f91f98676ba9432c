"""Scheduler: host policy. Who is computed next, in which mode, with which rows and pages.

Knows lengths and pages, never tensors. A step is either EXTEND (prefill chunks of one or more
rows) or BLOCK (one verify of every decoding row); when both are wanted they take turns, so a long
prompt delays decoding rows by one chunk at a time.

Pages: a row holds pages for every place that its next step may write. When none are left, the
youngest sequence is preempted: it loses row and pages and later recomputes (its published pages
usually are still in the prefix cache). Speculation never causes a preemption: a row's draft budget
shrinks to what its pages hold before anybody is evicted.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from typing import TYPE_CHECKING

from paceline.core.batch import ForwardMode
from paceline.engine.plan import Chunk, StepPlan
from paceline.engine.sequence import Phase, Sequence

if TYPE_CHECKING:
    from paceline.core.config import CacheConfig
    from paceline.engine.row_owner import RowOwner
    from paceline.kv.pages import PageAllocator
    from paceline.kv.prefix import PrefixCache

_ADMISSION_SHARE = 16  # free rows to wait for: this fraction of all
_MOST_WAIT = 8  # steps


class Scheduler:
    """Owns the sequences, the free rows and their pages.

    Args:
        config: sizes.
        allocator: of the pool's pages.
        prefix: pages that are findable by their tokens.
        owner: who is told of rows and pages that change hands.
        pages_per_row: most pages of a row.
        scratch: places after the known ones that drafting itself writes. A row without pages for
            them has no drafts: its keys would share the dummy page with other rows'.
    """

    def __init__(
        self,
        config: CacheConfig,
        allocator: PageAllocator,
        prefix: PrefixCache,
        owner: RowOwner,
        *,
        pages_per_row: int,
        scratch: int = 0,
    ) -> None:
        self._page = config.page_size
        self._scratch = scratch
        self._chunk = config.chunk_size
        self._allocator = allocator
        self._prefix = prefix
        self._owner = owner
        self._pages_per_row = pages_per_row
        self._free_rows = list(range(config.max_rows - 1, -1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # hold a row; in order of arrival
        self._last_mode = ForwardMode.BLOCK
        self._admission_batch = max(1, config.max_rows // _ADMISSION_SHARE)
        self._steps_waited = 0
        self.num_preemptions = 0
        self._num_looked_up = self._num_found = 0  # prompt tokens, in the prefix cache

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or holds a row."""
        return bool(self.waiting or self.running)

    @property
    def has_grammar(self) -> bool:
        """Whether a row has a grammar: then each step's results must be read before the next one."""
        return any(s.guide is not None for s in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; first come, first served."""
        self.waiting.append(sequence)

    def schedule(self, max_draft: int) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed now.

        Args:
            max_draft: most draft nodes per row that the drafter may want verified.
        """
        if self._admission_pays():
            self._admit()
        extends = [s for s in self.running if s.phase is Phase.PREFILL]
        blocks = [s for s in self.running if s.phase is Phase.DECODE and self._may_step(s)]
        if extends and (self._last_mode is ForwardMode.BLOCK or not blocks):
            plan = self._plan_extend(extends)
            if plan is not None:
                self._last_mode = ForwardMode.EXTEND
                return plan
        if blocks:
            self._last_mode = ForwardMode.BLOCK
            return self._plan_block(blocks, max_draft)
        return None

    @staticmethod
    def _may_step(sequence: Sequence) -> bool:
        """A row whose known and in-flight tokens reach its limit has nothing left to emit."""
        return sequence.finish is None and sequence.room - sequence.in_flight > 0

    def finish(self, sequence: Sequence, *, finished: bool) -> None:
        """Give back row and pages of an ended sequence (no step of it may be in flight)."""
        assert sequence.in_flight == 0, "a step in flight still writes to this row"
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.row >= 0:
            self._release(sequence, finished=finished)
        sequence.phase = Phase.DONE

    def publish(self, sequence: Sequence) -> None:
        """Make the full pages of what is cached findable by later prompts."""
        if sequence.num_cached // self._page > sequence.num_published:
            sequence.num_published = self._prefix.publish(
                sequence.tokens[: sequence.num_cached + self._prefix.lookahead],
                sequence.pages,
                sequence.request.scope,
                sequence.num_published,
                num_written=sequence.num_cached,
            )

    def report(self) -> dict[str, float]:
        """Counters and the state of rows and pages, by name."""
        pages = self._allocator
        return {
            "num_preemptions": float(self.num_preemptions),
            "num_waiting": float(len(self.waiting)),
            "num_running": float(len(self.running)),
            "prefix_cache_queries": float(self._num_looked_up),
            "prefix_cache_hits": float(self._num_found),
            "kv_pages": float(pages.num_pages),
            "kv_page_size": float(self._page),
            "kv_cache_usage": pages.num_used / pages.num_pages,  # of 1
        }

    def check_integrity(self) -> None:
        """Assert that rows and pages add up; for tests and idle moments."""
        rows = [s.row for s in self.running] + self._free_rows
        assert sorted(rows) == list(range(len(rows))), "a row is lost or held twice"
        assert all(s.row < 0 and not s.pages for s in self.waiting), (
            "a waiting sequence holds state"
        )
        self._allocator.check_integrity([s.pages for s in self.running])

    # -- admission and pages ------------------------------------------------------------------

    def _admission_pays(self) -> bool:
        """Whether to prefill now, or to wait a few steps for more free rows.

        With many rows a prompt at a time would put a nearly empty prefill before every decode step;
        the wait is bounded, and with up to 16 rows there is none.
        """
        decoding = any(s.phase is Phase.DECODE for s in self.running)
        self._steps_waited = self._steps_waited + 1 if self.waiting and self._free_rows else 0
        few = len(self._free_rows) < self._admission_batch
        if decoding and few and self._steps_waited < _MOST_WAIT:
            return False
        self._steps_waited = 0
        return True

    def _admit(self) -> None:
        unfilled = sum(self._missing(s) for s in self.running if s.phase is Phase.PREFILL)
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            if not self._owner.can_join(sequence) or not self._fits(sequence, unfilled):
                return
            self.waiting.popleft()
            hit = self._look_up(sequence)
            sequence.num_cached = hit
            sequence.num_published = len(sequence.pages)
            if sequence.num_preemptions == 0:
                sequence.num_hit = hit
            sequence.row = self._free_rows.pop()
            sequence.phase = Phase.PREFILL
            if sequence.started_at is None:
                sequence.started_at = time.perf_counter()
            bisect.insort(self.running, sequence, key=lambda s: s.arrival)
            unfilled += self._missing(sequence)
            self._owner.join(sequence)
            self._owner.pages_added(sequence, 0)

    def _look_up(self, sequence: Sequence) -> int:
        """Give a row the pages that are known already; returns their tokens. What is scored has none."""
        if sequence.scores_prompt:
            return 0
        target = sequence.prefill_target
        sequence.pages = self._prefix.match(sequence.tokens[:target], sequence.request.scope)
        hit = len(sequence.pages) * self._page
        self._num_looked_up += target
        self._num_found += hit
        return hit

    def _missing(self, sequence: Sequence) -> int:
        """Pages that a sequence in prefill has yet to take."""
        return max(0, -(-sequence.prefill_target // self._page) - len(sequence.pages))

    def _fits(self, sequence: Sequence, unfilled: int) -> bool:
        """Whether the pool holds this sequence's known tokens beside what runs already.

        `unfilled`: pages that admitted prompts have yet to take. A page of slack per running row
        keeps an admission from evicting somebody at once.
        """
        need = -(-(sequence.prefill_target + 1) // self._page)
        slack = len(self.running)
        return self._allocator.num_available >= need + unfilled + slack or not self.running

    def _hold(self, sequence: Sequence, places: int) -> bool:
        """Give the row pages for its first `places` cache places; False if none are left."""
        need = -(-places // self._page) - len(sequence.pages)
        if need <= 0:
            return True
        if need > self._allocator.num_available:
            return False
        start = len(sequence.pages)
        after = sequence.pages[-1] if sequence.pages else None
        sequence.pages.extend(self._allocator.allocate(need, after))
        assert len(sequence.pages) <= self._pages_per_row, "row outgrew its page table"
        self._owner.pages_added(sequence, start)
        return True

    def _must_hold(self, sequence: Sequence, places: int) -> bool:
        """Like `_hold`, preempting younger sequences; False if `sequence` itself was preempted."""
        while not self._hold(sequence, places):
            idle = [s for s in self.running if s.in_flight == 0]
            if not idle:
                return False
            youngest = idle[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take row and pages; the sequence waits, first in line, and recomputes later."""
        self._release(sequence, finished=False)
        sequence.phase = Phase.WAITING
        sequence.num_cached = sequence.num_published = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence, *, finished: bool) -> None:
        self._owner.leave(sequence, finished=finished)
        self._allocator.release(sequence.pages)
        sequence.pages = []
        self._free_rows.append(sequence.row)
        sequence.row = -1
        self.running.remove(sequence)

    # -- plans --------------------------------------------------------------------------------

    def _plan_extend(self, sequences: list[Sequence]) -> StepPlan | None:
        left = self._chunk
        chunks = []
        for sequence in sequences:
            if left == 0:
                break
            if sequence.phase is not Phase.PREFILL:  # preempted while an elder took pages
                continue
            target = sequence.prefill_target
            start = sequence.num_cached
            count = min(left, target - start)
            if not self._must_hold(sequence, start + count):
                continue
            left -= count
            final = start + count == target
            chunks.append(
                Chunk(
                    sequence=sequence,
                    start=start,
                    count=count,
                    final=final,
                    picks=final and sequence.num_emitted == 0,
                    scores=sequence.scores_prompt,
                )
            )
        kept = tuple(c for c in chunks if c.sequence.phase is Phase.PREFILL)
        return StepPlan(mode=ForwardMode.EXTEND, chunks=kept) if kept else None

    def _plan_block(self, sequences: list[Sequence], max_draft: int) -> StepPlan | None:
        planned: list[tuple[Sequence, int]] = []
        for sequence in sequences:
            if sequence.phase is not Phase.DECODE:
                continue
            # a step in flight may have cached a whole accepted path that the host has not read
            # (up to the limit, at which the device ends the row by itself)
            known = sequence.num_cached + sequence.in_flight * (max_draft + 1)
            known = min(known, max(sequence.limit - 1, sequence.num_cached))
            if not self._must_hold(sequence, known + 1):
                continue
            budget = max_draft if sequence.room > 1 else 0
            cap = sequence.request.params.num_speculative_tokens
            if cap is not None:
                budget = min(budget, cap)
            if budget:
                wanted = known + max(1 + budget, self._scratch)
                self._hold(sequence, min(wanted, self._pages_per_row * self._page))
                room = len(sequence.pages) * self._page - known
                budget = min(budget, room - 1) if room >= self._scratch else 0
            planned.append((sequence, budget))
        kept = [(s, b) for s, b in planned if s.phase is Phase.DECODE]
        if not kept:
            return None
        return StepPlan(
            mode=ForwardMode.BLOCK,
            sequences=tuple(s for s, _ in kept),
            budgets=tuple(b for _, b in kept),
        )
