"""What a server's /metrics says about speculation, before and after a run.

vLLM named the counters; llama.cpp and Paceline use the same names behind their own prefix. A server
may show them under two prefixes at once (Paceline does, if it is asked to), so one prefix counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LINE = re.compile(
    r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$"
)
_LABEL = re.compile(r'(?P<name>\w+)\s*=\s*"(?P<value>(?:[^"\\]|\\.)*)"')
_NAME = re.compile(
    r"^(?P<prefix>.*?)spec_decode_(?P<what>num_drafts|num_draft_tokens|num_accepted_tokens"
    r"|num_accepted_tokens_per_pos)(?:_total)?$"
)
_PREFIXES = ("paceline:", "vllm:", "llamacpp:")  # the first one that is there counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Speculation counters; also differences of them."""

    prefix: str
    num_drafts: int  # verify steps that had a draft
    num_draft_tokens: int
    num_accepted_tokens: int
    per_position: Mapping[
        int, int
    ]  # steps that accepted at least position + 1 tokens; may be empty

    @property
    def accept_length(self) -> float | None:
        """Tokens per such step, bonus included: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of what was drafted."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def position_rates(self) -> list[float]:
        """Share of steps that accepted at least one token, two tokens, ...; empty if unknown."""
        if not self.per_position or not self.num_drafts:
            return []
        most = max(self.per_position)
        return [self.per_position.get(i, 0) / self.num_drafts for i in range(most + 1)]

    def contradiction(self) -> str | None:
        """What breaks the identity: accept length = 1 + sum of position rates. None: it holds."""
        if not self.per_position or self.accept_length is None:
            return None
        by_positions = sum(self.per_position.values())
        if by_positions == self.num_accepted_tokens:
            return None
        length = 1 + by_positions / self.num_drafts
        return (
            f"the server's counters contradict each other: accept length is {self.accept_length:.4f} by "
            f"totals ({self.num_accepted_tokens} accepted tokens) and {length:.4f} by positions "
            f"({by_positions}); one of them is wrong, or others used the server meanwhile"
        )

    def since(self, before: Counters) -> Counters | None:
        """What was counted since; None if the server started anew in between."""
        positions = {
            i: n - before.per_position.get(i, 0) for i, n in sorted(self.per_position.items())
        }
        found = Counters(
            prefix=self.prefix,
            num_drafts=self.num_drafts - before.num_drafts,
            num_draft_tokens=self.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - before.num_accepted_tokens,
            per_position=positions,
        )
        counts = (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens)
        return None if min(*counts, *positions.values()) < 0 else found


# A server whose counters appear with the first draft.
NOTHING_COUNTED = Counters(
    prefix="", num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, per_position={}
)


def read_counters(text: str, model: str | None = None) -> Counters | None:
    """Read the counters from Prometheus text; None if there are none.

    Args:
        text: what /metrics answers. Lines of other metrics, and broken ones, are passed over.
        model: count only this model's, if the server tells its models apart and has it.
    """
    samples = list(_samples(text.splitlines()))
    prefixes = dict.fromkeys(prefix for prefix, *_ in samples)
    chosen = next((p for p in _PREFIXES if p in prefixes), next(iter(prefixes), None))
    if chosen is None:
        return None
    mine = [(what, labels, n) for prefix, what, labels, n in samples if prefix == chosen]
    if any(labels.get("model_name") == model for _, labels, _ in mine):
        mine = [one for one in mine if one[1].get("model_name") in {model, None}]
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for what, labels, n in mine:
        totals[what] = totals.get(what, 0) + n
        if what == "num_accepted_tokens_per_pos" and labels.get("position", "").isdecimal():
            position = int(labels["position"])
            positions[position] = positions.get(position, 0) + n
    return Counters(
        prefix=chosen,
        num_drafts=totals.get("num_drafts", 0),
        num_draft_tokens=totals.get("num_draft_tokens", 0),
        num_accepted_tokens=totals.get("num_accepted_tokens", 0),
        per_position=positions,
    )


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, str, Mapping[str, str], int]]:
    """(prefix, counter, labels, value) of every line that has to do with speculation."""
    for line in lines:
        if "spec_decode_" not in line or line.startswith("#"):
            continue
        found = _LINE.match(line.strip())
        named = found and _NAME.match(found["name"])
        if not found or not named:
            continue
        try:
            value = int(float(found["value"]))
        except (ValueError, OverflowError):  # NaN, +Inf
            continue
        labels = {m["name"]: m["value"] for m in _LABEL.finditer(found["labels"] or "")}
        yield named["prefix"], named["what"], labels, value
