"""Reader: what a launched step's results mean for sequences, drafter and pages.

The tokens are brought to the host and cut at stops; ended sequences give back what they hold; the
drafter and the policy are told what became final. Nothing is computed here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.core.batch import ForwardMode
from paceline.core.request import FinishReason, StepOutput
from paceline.core.tree import FORCED, Proposal
from paceline.draft.base import HostCommit
from paceline.engine.launch import Pending
from paceline.engine.outcome import cut, followed, grown, logprobs_of, tree_shown
from paceline.engine.prompt_scores import keep
from paceline.engine.sequence import Phase, Sequence
from paceline.engine.step_tensors import StepTensors

if TYPE_CHECKING:
    from paceline.engine.build import Parts
    from paceline.engine.counters import Counters


class Reader:
    """Reads steps. One per engine.

    Args:
        parts: the engine's.
        counters: of the engine; counted up here.
        open_sequences: sequences by request id; those that have ended are taken out here.
    """

    def __init__(
        self, parts: Parts, counters: Counters, open_sequences: dict[str, Sequence]
    ) -> None:
        self._scheduler = parts.scheduler
        self._proposer = parts.proposer
        self._control = parts.control
        self._alarm = parts.alarm
        self._counters = counters
        self._open = open_sequences

    def read(self, pending: Pending) -> list[StepOutput]:
        """Bring a step's results to the host and act on them."""
        plan, tensors = pending.plan, pending.tensors
        if plan.mode is ForwardMode.EXTEND:
            sequences = [c.sequence for c in plan.chunks if c.picks]
            for chunk in plan.chunks:
                if not chunk.picks and chunk.sequence.finish is None:
                    self._scheduler.publish(chunk.sequence)
        else:
            sequences = list(plan.sequences)
        if tensors is None:
            self._counters.record_pass(plan, 0)
            return []
        if pending.ready is not None:
            pending.ready.synchronize()
        keep(plan.chunks, tensors.prompts)
        emitted = tensors.emitted.tolist()
        paths = [[0]] * len(sequences) if tensors.path is None else tensors.path.tolist()
        drafted = [0] * len(sequences) if tensors.drafted is None else tensors.drafted.tolist()
        origins = [[0]] * len(sequences) if tensors.sources is None else tensors.sources.tolist()
        outputs: list[StepOutput] = []
        for b, sequence in enumerate(sequences):
            sequence.in_flight -= 1
            tokens = [t for t in emitted[b] if t != -1]  # -1 is padding
            if sequence.finish is None and tokens:
                if plan.mode is ForwardMode.EXTEND:
                    if tokens[0] >= 0:
                        sequence.first_token_at = time.perf_counter()
                    sources = [0]
                else:
                    count = sum(i > 0 for i in paths[b])
                    sources = [*origins[b][1 : count + 1], 0]
                    sequence.num_cached += len(tokens)
                    forced = sources.count(FORCED)
                    sequence.record_step(
                        drafted[b], _by_drafter(pending, b, drafted[b]), count, forced
                    )
                    self._counters.record_row(drafted[b], count, forced)
                    self._watch(pending, b, tokens[0], drafted[b], sources[0])
                shown = _shown(pending, b) if sequence.request.shows_trees else None
                outputs.append(self._take(sequence, tokens, sources, tensors, b, shown))
        self._counters.record_pass(plan, sum(len(out.token_ids) for out in outputs))
        self._tell({s.request.id: s for s in sequences}, outputs)
        for sequence in sequences:
            if sequence.finish is None:
                self._scheduler.publish(sequence)
            else:
                self.retire(sequence)
        if pending.drafted is not None:
            seconds, proposing = time.perf_counter() - pending.started, pending.propose_seconds
            self._alarm.took(seconds + proposing, proposing if pending.drafted.aside else 0.0)
            self._control.observe(
                pending.drafted,
                [[t for t in row if t >= 0] for row in emitted],
                seconds,
                proposing,
            )
        return outputs

    def _watch(self, pending: Pending, b: int, token: int, drafted: int, source: int) -> None:
        """Tell the alarm what became of the drafts of the step's b-th row.

        Args:
            pending: the step.
            b: which row.
            token: the first that it emitted; it may be NOT_FINITE.
            drafted: verified nodes.
            source: of the first accepted one; 0: none was.
        """
        if not self._alarm.active or not pending.plan.budgets[b]:
            return
        if pending.plan.sequences[b].guide is not None:  # no drafter knows what a grammar wants
            return
        right: int | None = None
        if pending.drafted is not None and pending.drafted.offered:
            right = self._alarm.first_right(pending.drafted.offered[b], token)
        elif drafted:  # the tree stays on the device, and all of it was verified
            right = source
        self._alarm.saw(pending.plan.sequences[b].request.params, right)

    def _take(
        self,
        sequence: Sequence,
        emitted: list[int],
        sources: list[int],
        tensors: StepTensors,
        b: int,
        shown: Proposal | None,
    ) -> StepOutput:
        """Append what a row emitted, cut at the first stop; end the row if that ends it.

        `emitted` is not empty; its last entry may be NOT_FINITE. `shown` is what was proposed, if the
        request wants to see it.
        """
        kept = cut(sequence, emitted)
        if sequence.guide is not None:
            kept = followed(sequence, sequence.guide, kept)
        count = len(kept.tokens)
        tree = None if shown is None else tree_shown(sequence, shown, tensors, b, kept.tokens)
        prompt_logprobs = sequence.take_prompt_scores()
        sequence.tokens += kept.tokens
        sequence.num_cached = min(sequence.num_cached, len(sequence.tokens))
        if kept.reason is not None:
            self.end(sequence, kept.reason)
        return StepOutput(
            request_id=sequence.request.id,
            token_ids=tuple(kept.tokens),
            logprobs=logprobs_of(sequence, tensors, b, count),
            sources=tuple(sources[:count]),
            finish_reason=kept.reason,
            stop_token_id=kept.stop_token_id,
            error=kept.error,
            fault=kept.fault,
            stats=None if kept.reason is None else sequence.stats(),
            tree=tree,
            prompt_logprobs=prompt_logprobs,
        )

    def _tell(self, sequences: dict[str, Sequence], outputs: list[StepOutput]) -> None:
        """Tell the drafter what the rows emitted, already cut."""
        if outputs:
            self._proposer.tell(
                HostCommit(
                    rows=[sequences[out.request_id].row for out in outputs],
                    tokens=[out.token_ids for out in outputs],
                )
            )

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The request ends for this reason; what it holds is given back by `retire`."""
        sequence.finish = reason
        sequence.finished_at = time.perf_counter()

    def retire(self, sequence: Sequence) -> None:
        """Give back what an ended sequence holds, once no step of it is in flight."""
        if sequence.in_flight or sequence.phase is Phase.DONE:
            return
        finished = sequence.finish in (FinishReason.STOP, FinishReason.LENGTH)
        if sequence.row >= 0 and finished:
            self._scheduler.publish(sequence)
        self._scheduler.finish(sequence, finished=finished)
        self._open.pop(sequence.request.id, None)
        self._control.forget(sequence.request.id)


def _by_drafter(pending: Pending, b: int, drafted: int) -> int:
    """How many of the drafted nodes of a step's b-th row the drafter proposed; a grammar the others."""
    if not drafted or pending.drafted is None or pending.plan.sequences[b].guide is None:
        return drafted
    return drafted - pending.drafted.proposals[b].sources.count(FORCED)


def _shown(pending: Pending, b: int) -> Proposal | None:
    """The tree of a step's b-th row; None: the step verified none."""
    if pending.drafted is None:
        return None
    if pending.drafted.grown and pending.tensors is not None:
        return grown(pending.tensors, b)
    return pending.drafted.proposals[b]
