"""NgramDrafter: proposes what followed the same last n tokens in the row's own text.

The longest n in [prompt_lookup_min, prompt_lookup_max] that occurred before wins (prompt lookup
decoding). Among several occurrences the most recent one is copied: up to the budget, never past the
end of the text, so a loop of p tokens proposes p. One dictionary per n maps the n tokens to the
place after their latest occurrence, so an emitted token costs one entry per n and a proposal one
look-up per n, whatever the length of the text.

Scores say how likely a copied token is right by how many tokens match before it (`survival.py`).

Not here: occurrence counts and past outputs (`suffix.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import EMPTY, Proposal
from paceline.draft.base import DrafterSpec, HostCommit
from paceline.draft.survival import Drafted, Survival

_OWN = 1


class _Row:
    """A row's text and where its n-grams occurred last.

    An n-gram enters its index when the token after it is known, so the text's own end is never
    found, and every place in an index has a token.
    """

    __slots__ = ("_after", "_sizes", "last", "num_steps", "text")

    def __init__(self, sizes: Sequence[int]) -> None:
        self.text: list[int] = []
        self.last: Drafted | None = None  # proposed and not judged yet
        self.num_steps = 0
        self._sizes = sizes  # longest first
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in sizes]

    def append(self, tokens: Sequence[int]) -> None:
        text = self.text
        for token in tokens:
            end = len(text)
            for n, after in zip(self._sizes, self._after, strict=True):
                if n <= end:
                    after[tuple(text[end - n :])] = end
                    self.num_steps += 1
            text.append(token)

    def find(self) -> tuple[int, int] | None:
        """(n, place after the latest earlier occurrence of the last n tokens), n as long as can."""
        for n, after in zip(self._sizes, self._after, strict=True):
            place = after.get(tuple(self.text[-n:]))
            if place is not None:
                return n, place
        return None


class NgramDrafter:
    """A `HostDrafter` over the rows' own n-grams; see the module.

    Args:
        config: `method` "ngram", `prompt_lookup_min` and `prompt_lookup_max`.

    Raises:
        ConfigError: the n-gram lengths or the number of draft tokens are out of range.
    """

    def __init__(self, config: DraftConfig) -> None:
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        if not 1 <= shortest <= longest:
            msg = (
                f"prompt_lookup_min {shortest} and prompt_lookup_max {longest} were asked for; "
                "possible is 1 <= min <= max; set both (defaults: 2 and 5)"
            )
            raise ConfigError(msg)
        most = config.num_speculative_tokens
        if most < 0:
            msg = (
                f"num_speculative_tokens {most} was asked for; possible is 0 or more; "
                "0 turns speculation off"
            )
            raise ConfigError(msg)
        self.spec = DrafterSpec(
            name="ngram",
            max_nodes=most + 1,
            max_depth=most,
            on_host=True,
            sources={_OWN: "own text"},
        )
        self._sizes = range(longest, shortest - 1, -1)
        self._rows: dict[int, _Row] = {}
        self._survival = Survival()

    def join(self, row: int, tokens: Sequence[int], num_prompt: int, scope: str) -> None:  # noqa: ARG002
        """Take a row's text so far; equal to having observed it. See `HostDrafter`."""
        self._rows[row] = _Row(self._sizes)
        self._rows[row].append(tokens)

    def observe(self, commit: HostCommit) -> None:
        """Append what the rows emitted: constant time per token."""
        for number, tokens in zip(commit.rows, commit.tokens, strict=True):
            row = self._rows[number]
            if row.last is not None:
                self._survival.learn(row.last, tokens)
                row.last = None
            row.append(tokens)

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:
        """One chain per row, empty where nothing matches. See `HostDrafter`."""
        return [self._propose(self._rows[r], b) for r, b in zip(rows, budgets, strict=True)]

    def leave(self, row: int, *, keep: bool) -> None:  # noqa: ARG002 (no past is used)
        """Free the row."""
        del self._rows[row]

    def _propose(self, row: _Row, budget: int) -> Proposal:
        limit = min(budget, self.spec.max_depth)
        row.last = None
        match = row.find() if limit > 0 else None
        if match is None:
            return EMPTY
        n, place = match
        tokens = row.text[place : place + limit]
        drafted = Drafted(
            source=_OWN,
            length=n,
            tokens=tokens,
            parents=range(-1, len(tokens) - 1),
            probs=[1.0] * len(tokens),
        )
        row.last = drafted
        return Proposal(
            tokens=tokens,
            parents=drafted.parents,
            scores=self._survival.scores(drafted),
            sources=[_OWN] * len(tokens),
        )
