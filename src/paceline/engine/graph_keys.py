"""Which graphs there are: what a captured step was made for, and the ladder that steps are padded to.

    trees   root    plain decoding; a drafter network observes all the same
            grown   made by the step itself (a drafter network, alone or merged)
            given   made by the host (n-gram, suffix)

Not here: who records them (`graphs.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.ops.triton.sizes import power_of_two
from paceline.sample.options import NOISE

_LEAST_PAGES = 64
_USUAL_TOKENS = 2048  # of context: where most requests begin and many end


class Trees(enum.Enum):
    """Where a step's trees come from."""

    ROOT = "root"
    GROWN = "grown"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured step was made for."""

    trees: Trees
    rows: int  # padded
    tokens: int  # verified, roots included
    pages: int  # padded
    options: int  # word of the sampling options in play
    num_logprobs: int
    masked: bool = False  # a grammar says which tokens are allowed at each node

    def __str__(self) -> str:
        rows, tokens = (
            f"{n} {what}{'' if n == 1 else 's'}"
            for n, what in ((self.rows, "row"), (self.tokens, "token"))
        )
        return (
            f"a step of {rows}, {tokens} (trees: {self.trees.value}) with up to {self.pages} pages a row, "
            f"sampling options {self.options:#x}, log-probabilities {self.num_logprobs}"
            f"{', a grammar' if self.masked else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """What steps are padded to, so that few graphs serve all of them."""

    num_rows: int  # most of a step
    max_nodes: int  # of a tree, root included
    grown_nodes: int  # of a tree that the step makes, on average over its rows
    max_pages: int  # that a row may have
    page_size: int

    def key(
        self,
        trees: Trees,
        *,
        rows: int,
        drafted: int,
        pages: int,
        options: int,
        num_logprobs: int,
        masked: bool = False,
    ) -> GraphKey:
        """The graph that serves a step.

        Args:
            trees: where they come from.
            rows: of the step.
            drafted: GIVEN: draft nodes in all.
            pages: of a row that the step may look at.
            options: word of the sampling options in play.
            num_logprobs: most that a row asks for; -1: none.
            masked: whether a row has a grammar.
        """
        padded = next(n for n in self.rows() if n >= rows)
        return GraphKey(
            trees=trees,
            rows=padded,
            tokens=self._tokens(trees, padded, drafted),
            pages=min(max(_LEAST_PAGES, power_of_two(pages)), self.max_pages),
            options=options,
            num_logprobs=num_logprobs,
            masked=masked,
        )

    def rows(self) -> list[int]:
        """Padded row counts: powers of two, and the capacity itself."""
        sizes = [1]
        while sizes[-1] < self.num_rows:
            sizes.append(min(2 * sizes[-1], self.num_rows))
        return sizes

    def usual(self, trees: Iterable[Trees]) -> list[GraphKey]:
        """What service meets with requests that are greedy or merely have a temperature.

        All rows and tokens of the ladder, for contexts of up to 2,048 tokens. Short contexts come first,
        as every request has one; within them the largest step, whose memory the others then share.
        """
        keys = [
            self.key(
                kind, rows=rows, drafted=drafted, pages=pages, options=options, num_logprobs=-1
            )
            for pages in self._usual_pages()
            for kind in trees
            for rows in self.rows()
            for drafted in self._drafted(kind, rows)
            for options in (0, NOISE)
        ]
        distinct = dict.fromkeys(keys)
        return sorted(distinct, key=lambda k: (k.pages, -k.tokens, -k.rows))

    def _usual_pages(self) -> list[int]:
        widths = [_LEAST_PAGES]
        while widths[-1] * self.page_size < _USUAL_TOKENS and widths[-1] < self.max_pages:
            widths.append(2 * widths[-1])
        return widths

    def _drafted(self, trees: Trees, rows: int) -> list[int]:
        """Draft nodes that need a graph of their own: those that fill a rung."""
        if trees is not Trees.GIVEN:
            return [0]
        return [rows * (nodes - 1) for nodes in self._rungs()]

    def _rungs(self) -> list[int]:
        """Nodes a row that a step with trees from the host is padded to, on average."""
        rungs = [2]
        while rungs[-1] < self.max_nodes:
            rungs.append(min(2 * rungs[-1], self.max_nodes))
        return rungs

    def _tokens(self, trees: Trees, rows: int, drafted: int) -> int:
        """Tokens of a padded step: all that may be grown, or the next rung above what was given."""
        if trees is Trees.ROOT:
            return rows
        if trees is Trees.GROWN:
            return rows * self.grown_nodes
        return min(rows * power_of_two(-(-(rows + drafted) // rows)), rows * self.max_nodes)
