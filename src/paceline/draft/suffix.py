"""SuffixDrafter: proposes what followed the same context before, as often as it did.

Two sources per row: a suffix tree over the row's own text (prompt and output), and one over the
finished outputs of the row's scope. The row's own wins unless the past scores strictly higher.
Counts alone decide what and how much is proposed (`suffix_growth.py`); what the policy gets as
scores is a survival estimate learned from what was emitted (`survival.py`).

Past outputs are kept up to `suffix_max_cached_tokens` over all scopes together, the oldest leaving
first; a token costs about 240 bytes. Sources: 1 the row's own text, 2 past outputs.

Not here: the trees (`suffix_tree.py`); how many of the nodes are verified (`cost/policy.py`).
Method: SuffixDecoding (Oliaro et al., arXiv 2411.04975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import EMPTY, Proposal
from paceline.draft.base import DrafterSpec, HostCommit
from paceline.draft.suffix_counts import Counts
from paceline.draft.suffix_growth import NOTHING, Rule, best_growth
from paceline.draft.suffix_tree import SuffixTree
from paceline.draft.survival import Drafted, Survival

_OWN, _PAST = 1, 2


class PastOutputs:
    """Suffix trees over finished outputs, one per scope, with one budget over all scopes.

    Args:
        depth: longest counted string, tokens.
        max_tokens: most tokens kept; 0 keeps nothing.
    """

    def __init__(self, depth: int, max_tokens: int) -> None:
        self._depth = depth
        self._max_tokens = max_tokens
        self._trees: dict[str, SuffixTree] = {}
        self._order: deque[str] = deque()  # scope of each sequence held, oldest first
        self.num_tokens = 0

    def tree(self, scope: str) -> SuffixTree | None:
        """The tree of a scope; None while it holds nothing."""
        return self._trees.get(scope)

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        """Keep a finished output; of one longer than the whole budget, its end."""
        kept = tokens[max(0, len(tokens) - self._max_tokens) :]
        if not kept:
            return
        while self.num_tokens + len(kept) > self._max_tokens:
            self._evict()
        tree = self._trees.setdefault(scope, SuffixTree(self._depth))
        tree.extend(kept)
        tree.close()
        self._order.append(scope)
        self.num_tokens += len(kept)

    def _evict(self) -> None:
        scope = self._order.popleft()
        tree = self._trees[scope]
        self.num_tokens -= tree.evict()
        if not len(tree):
            del self._trees[scope]


class _Row:
    __slots__ = ("last", "num_prompt", "scope", "tree")

    def __init__(self, tree: SuffixTree, num_prompt: int, scope: str) -> None:
        self.tree = tree
        self.num_prompt = num_prompt
        self.scope = scope
        self.last: Drafted | None = None  # proposed and not judged yet


class SuffixDrafter:
    """A `HostDrafter` over suffix trees; see the module.

    Args:
        config: `method` "suffix", `num_speculative_tokens` and the `suffix_*` fields.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(self, config: DraftConfig) -> None:
        _check(config)
        most = config.num_speculative_tokens
        self.spec = DrafterSpec(
            name="suffix",
            max_nodes=most + 1,
            max_depth=most,
            on_host=True,
            sources={_OWN: "own text", _PAST: "past outputs"},
        )
        self._longest = config.suffix_max_depth
        self._rule = Rule(
            factor=config.suffix_max_spec_factor,
            min_prob=config.suffix_min_token_prob,
            shape=config.suffix_shape,
        )
        # Strings are counted far enough for the longest match plus a whole proposal.
        self._depth = config.suffix_max_depth + most
        self._rows: dict[int, _Row] = {}
        self._past = PastOutputs(self._depth, config.suffix_max_cached_tokens)
        self._survival = Survival()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of past outputs held, over all scopes."""
        return self._past.num_tokens

    def join(self, row: int, tokens: Sequence[int], num_prompt: int, scope: str) -> None:
        """Take a row's text so far; equal to having observed it. See `HostDrafter`."""
        tree = SuffixTree(self._depth)
        tree.extend(tokens)
        self._rows[row] = _Row(tree, num_prompt, scope)

    def observe(self, commit: HostCommit) -> None:
        """Append what the rows emitted: O(depth) amortised per token, usually a few steps."""
        for number, tokens in zip(commit.rows, commit.tokens, strict=True):
            row = self._rows[number]
            if row.last is not None:
                self._survival.learn(row.last, tokens)
                row.last = None
            row.tree.extend(tokens)

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:
        """One tree or path per row, empty where nothing matches. See `HostDrafter`."""
        return [self._propose(self._rows[r], b) for r, b in zip(rows, budgets, strict=True)]

    def leave(self, row: int, *, keep: bool) -> None:
        """Free the row; with `keep` its output (not its prompt) enters its scope's past."""
        left = self._rows.pop(row)
        if keep:
            self._past.add(left.scope, left.tree.open_tokens()[left.num_prompt :])

    def _propose(self, row: _Row, budget: int) -> Proposal:
        limit = min(budget, self.spec.max_depth)
        row.last = None
        if limit <= 0:
            return EMPTY
        counts = Counts(row.tree)
        best = own = best_growth(counts, counts.own_suffixes(self._longest), limit, self._rule)
        past = self._past.tree(row.scope)
        if past is not None:
            counts = Counts(past)
            suffixes = counts.find_suffixes(row.tree.open_tokens(self._longest), self._longest)
            best = best_growth(counts, suffixes, limit, self._rule, above=own)
        if best is NOTHING:
            return EMPTY
        drafted = Drafted(
            source=_OWN if best is own else _PAST,
            length=best.length,
            tokens=best.tokens,
            parents=best.parents,
            probs=best.probs,
        )
        row.last = drafted
        return Proposal(
            tokens=best.tokens,
            parents=best.parents,
            scores=self._survival.scores(drafted),
            sources=[drafted.source] * len(best.tokens),
        )


def _check(config: DraftConfig) -> None:
    """Raise ConfigError, naming all settings that are out of range."""
    bounds = (
        ("num_speculative_tokens", config.num_speculative_tokens >= 0, "0 or more"),
        ("suffix_max_depth", config.suffix_max_depth >= 1, "1 or more"),
        ("suffix_max_spec_factor", config.suffix_max_spec_factor > 0, "above 0"),
        ("suffix_min_token_prob", 0 <= config.suffix_min_token_prob <= 1, "0 ... 1"),
        ("suffix_max_cached_tokens", config.suffix_max_cached_tokens >= 0, "0 or more"),
        ("suffix_shape", config.suffix_shape in ("tree", "path"), "'tree' or 'path'"),
    )
    wrong = [
        f"{name} {getattr(config, name)!r} was asked for; possible is {possible}"
        for name, fine, possible in bounds
        if not fine
    ]
    if wrong:
        msg = "; ".join(wrong) + "; correct the draft settings (the defaults are in `DraftConfig`)"
        raise ConfigError(msg)
