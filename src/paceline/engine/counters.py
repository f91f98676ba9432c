"""Counters of an engine since its start: what metrics and logs are made from."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.batch import ForwardMode

if TYPE_CHECKING:
    from paceline.engine.plan import StepPlan


# Upper ends of the buckets in which passes are counted by their tokens; vLLM's.
PASS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Counters:
    """Monotone sums; names follow the Prometheus counters that tools already read."""

    num_extend_steps: int = 0
    num_block_steps: int = 0
    num_prefill_tokens: int = 0  # prompt tokens computed (prefix hits are not)
    num_emitted: int = 0
    num_steps: int = 0  # row-steps that verified, with drafts or without
    num_drafts: int = 0  # row-steps with at least one draft node
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0  # of the accepted ones, those that a grammar proposed
    accepted_per_pos: list[int] = field(default_factory=list)
    # Passes by their tokens: those over the last end of `PASS_TOKENS` last.
    passes: list[int] = field(default_factory=lambda: [0] * (len(PASS_TOKENS) + 1))

    def record_pass(self, plan: StepPlan, emitted: int) -> None:
        """Count one target pass; `emitted` tokens came of it."""
        computed = 0
        if plan.mode is ForwardMode.EXTEND:
            self.num_extend_steps += 1
            computed = sum(c.count for c in plan.chunks)
            self.num_prefill_tokens += computed
        else:
            self.num_block_steps += 1
        self.num_emitted += emitted
        self.passes[bisect_left(PASS_TOKENS, computed + emitted)] += 1

    def record_row(self, drafted: int, accepted: int, forced: int) -> None:
        """Count one row's verify."""
        self.num_steps += 1
        if drafted:
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            self.num_forced_tokens += forced
        while len(self.accepted_per_pos) < accepted:
            self.accepted_per_pos.append(0)
        for i in range(accepted):
            self.accepted_per_pos[i] += 1

    def as_dict(self) -> dict[str, float]:
        """Counters by name; those of a depth of trees, or of a bucket, have its number at their end."""
        return {
            "num_extend_steps": float(self.num_extend_steps),
            "num_block_steps": float(self.num_block_steps),
            "num_prefill_tokens": float(self.num_prefill_tokens),
            "num_emitted": float(self.num_emitted),
            "spec_decode_num_steps": float(self.num_steps),
            "spec_decode_num_drafts": float(self.num_drafts),
            "spec_decode_num_draft_tokens": float(self.num_draft_tokens),
            "spec_decode_num_accepted_tokens": float(self.num_accepted_tokens),
            "spec_decode_num_forced_tokens": float(self.num_forced_tokens),
            **{
                f"spec_decode_num_accepted_tokens_per_pos_{depth}": float(count)
                for depth, count in enumerate(self.accepted_per_pos)
            },
            **{
                f"iteration_tokens_le_{end}": float(count)
                for end, count in zip((*PASS_TOKENS, "inf"), self.passes, strict=True)
            },
            "iteration_tokens_sum": float(self.num_prefill_tokens + self.num_emitted),
        }
