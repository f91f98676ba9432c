"""Guides: the grammars of running requests, as steps ask them.

A guide stands where its row's emitted tokens have led. Before a verify the host walks the row's draft
tree with it: what the grammar forbids is cut, since the target can never choose it, and wherever the
grammar knows what must come its own tokens join the tree, as sure as the node before them. Everything
tried is taken back; only what was really emitted moves a guide on (`follow`).

    drafted    {" - name - " - Bob - ",   and  {" - id  (cut)        the grammar: "name" first, then "age"
    verified   {" - name - ":" - Bob - "," - age - ":                the last two nodes cost no drafter

Masks. Each verified node has the mask of its own path. On a CPU the walk over the tree computes them at
the nodes that it reaches (`sample/hostwalk.py`); elsewhere all are made here before the step, `masks_of`.

Letters: T verified nodes, V vocabulary, W = ceil(V / 32).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import RequestError
from paceline.core.request import Fault
from paceline.core.tree import EMPTY, FORCED, Proposal
from paceline.draft.best_nodes import best_of
from paceline.draft.merged import fold
from paceline.engine.control import prune

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.core.request import Grammar

log = logging.getLogger(__name__)

_WORD_BYTES = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a grammar does not go on, and whose doing it is."""

    why: str
    fault: Fault


class Guide:
    """One request's grammar, guarded: nothing raises, what fails allows no token any more.

    A `Grammar` itself, for the walk.

    Args:
        grammar: of the request; its state belongs to this guide from now on.
        vocab_size: V.
    """

    def __init__(self, grammar: Grammar, vocab_size: int) -> None:
        self._grammar = grammar
        self._num_bytes = _WORD_BYTES * -(-vocab_size // 32)
        self._nothing = bytes(self._num_bytes)
        self._broken: Failure | None = None  # why no state can be relied on any more

    def mask(self) -> bytes:
        """See `Grammar`. No bit is set where the grammar fails."""
        found = self._asked()
        return self._nothing if isinstance(found, Failure) else found

    def advance(self, token_id: int) -> bool:
        """See `Grammar`."""
        return self._guarded(lambda: self._grammar.advance(token_id), otherwise=False)

    def rollback(self, num_tokens: int) -> None:
        """See `Grammar`."""
        if num_tokens:
            self._guarded(lambda: self._grammar.rollback(num_tokens), otherwise=None)

    def forced(self) -> Sequence[int]:
        """See `Grammar`."""
        return self._guarded(self._grammar.forced, otherwise=())

    def follow(self, tokens: Sequence[int]) -> int:
        """Move on by emitted tokens; returns how many of them the grammar took."""
        for i, token in enumerate(tokens):
            if not self.advance(token):
                return i
        return len(tokens)

    def allowed_after(self, tokens: Sequence[int]) -> bytes | Failure:
        """The mask after these tokens, or why nothing may follow them. Stays."""
        taken = self.follow(tokens)
        found = self._asked()
        self.rollback(taken)
        failure = self._broken or (found if isinstance(found, Failure) else None)
        if failure is not None:
            return Failure(f"it failed ({failure.why})", failure.fault)
        assert isinstance(found, bytes), "all failures were told"
        if taken < len(tokens):
            token = tokens[taken]
            if token in ids_of(found):  # allowed by the mask, and then beyond the grammar's limits
                why = (
                    f"it allows token {token} and cannot go on with it, as it is too complex there"
                )
                return Failure(why, Fault.REQUEST)
            why = f"it does not allow token {token}, which was emitted"
            return Failure(why, Fault.ENGINE)
        if not found.strip(b"\0"):
            return Failure("it allows no token of the model's vocabulary", Fault.REQUEST)
        return found

    def _asked(self) -> bytes | Failure:
        """The mask, or why there is none."""
        if self._broken is not None:
            return self._broken
        try:
            mask = self._grammar.mask()
        except Exception as error:
            log.debug("a grammar gave no mask", exc_info=True)
            return _told(error)
        if len(mask) != self._num_bytes:
            why = f"its mask has {len(mask)} bytes instead of {self._num_bytes}"
            return Failure(why, Fault.ENGINE)
        return mask

    def _guarded(self, call: Callable[[], T], *, otherwise: T) -> T:
        """What a call returns; once one has raised, no state can be relied on."""
        if self._broken is not None:
            return otherwise
        try:
            return call()
        except Exception as error:
            log.exception("a request's grammar failed")
            self._broken = _told(error)
            return otherwise


def shaped(
    guides: Sequence[Guide | None], proposals: Sequence[Proposal], budgets: Sequence[int]
) -> list[Proposal]:
    """Proposals without what the grammars forbid, with what they force in front.

    Args:
        guides: one per row; None: no grammar.
        proposals: one per row.
        budgets: most nodes of each.
    """
    return [
        p if guide is None else _shaped(guide, p, budget)
        for guide, p, budget in zip(guides, proposals, budgets, strict=True)
    ]


def forced_of(guides: Sequence[Guide | None], budgets: Sequence[int]) -> list[Proposal]:
    """What the grammars alone propose: a chain for each row, survival 1; maybe empty."""
    return shaped(guides, [EMPTY] * len(guides), budgets)


def masks_of(
    guides: Sequence[Guide | None], proposals: Sequence[Proposal], vocab_size: int, *, pinned: bool
) -> Tensor:
    """The masks of a step's nodes, root and proposal of one row after the other: [T, W] int32.

    Args:
        guides: one per row; None: everything is allowed.
        proposals: one per row, all of whose nodes are verified.
        vocab_size: V.
        pinned: in memory that a GPU copies from without the host's waiting.
    """
    total = len(proposals) + sum(len(p.tokens) for p in proposals)
    words = torch.full((total, -(-vocab_size // 32)), -1, dtype=torch.int32, pin_memory=pinned)
    rows = words.numpy()
    first = 0
    for guide, proposal in zip(guides, proposals, strict=True):
        if guide is not None:
            visit(guide, proposal, _writer(guide, rows, first + 1))
        first += 1 + len(proposal.tokens)
    return words


def visit(guide: Guide, proposal: Proposal, at: Callable[[int], Sequence[int]]) -> list[bool]:
    """Go through a proposal depth first, the guide with it.

    Args:
        guide: stands at the root, and does so again afterwards.
        proposal: its nodes.
        at: called where the guide stands at the root (-1) and at each node that can be chosen; returns
            tokens of which the first is the only child that is looked at, or nothing.

    Returns:
        For each node whether its path can be chosen.
    """
    children: list[list[int]] = [[] for _ in range(len(proposal.tokens) + 1)]
    for i, parent in enumerate(proposal.parents):
        children[parent + 1].append(i)

    def below(node: int) -> Iterator[int]:
        only = at(node)[:1]
        return iter([i for i in children[node + 1] if not only or proposal.tokens[i] == only[0]])

    chosen = [False] * len(proposal.tokens)
    levels = [below(-1)]  # what is still to be looked at, on the path where the guide stands
    while levels:
        node = next(levels[-1], None)
        if node is None:
            levels.pop()
            if levels:
                guide.rollback(1)
        elif guide.advance(proposal.tokens[node]):
            chosen[node] = True
            levels.append(below(node))
    return chosen


def _shaped(guide: Guide, proposal: Proposal, budget: int) -> Proposal:
    """The nodes that can be chosen, and after each of them the tokens that are forced there."""
    if not budget:
        return EMPTY
    runs: dict[int, Sequence[int]] = {}

    def at(node: int) -> Sequence[int]:
        run = guide.forced()[:budget]
        if run:
            runs[node] = run
        return run

    chosen = visit(guide, proposal, at)
    if not runs:
        return best_of(prune(proposal, len(proposal.tokens), chosen), budget)
    return best_of(fold([_lengthened(proposal, chosen, runs)]), budget)


def _lengthened(
    proposal: Proposal, chosen: Sequence[bool], runs: Mapping[int, Sequence[int]]
) -> Proposal:
    """The chosen nodes, and runs of forced tokens by the node that they follow; some nodes come twice."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sources: list[int] = []
    place = {-1: -1}

    def add(token: int, parent: int, score: float, source: int) -> int:
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        sources.append(source)
        return len(tokens) - 1

    for token in runs.get(
        -1, ()
    ):  # first, so that they are the grammar's where a drafter is as sure
        add(token, len(tokens) - 1, 0.0, FORCED)
    for i, token in enumerate(proposal.tokens):
        if chosen[i]:
            source = proposal.sources[i] if proposal.sources else 1
            place[i] = add(token, place[proposal.parents[i]], proposal.scores[i], source)
    for node, run in runs.items():
        above = place[node]
        for token in run if node >= 0 else ():
            above = add(token, above, proposal.scores[node], FORCED)
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=sources)


def _writer(guide: Guide, rows: NDArray[np.int32], first: int) -> Callable[[int], Sequence[int]]:
    """Puts the guide's mask into the row of the node that it stands at; the root is at `first` - 1."""

    def write(node: int) -> Sequence[int]:
        rows[first + node] = np.frombuffer(guide.mask(), dtype="<i4")
        return ()

    return write


def any_of(guides: Iterable[Guide | None]) -> bool:
    """Whether a step has a row with a grammar."""
    return any(guide is not None for guide in guides)


def ids_of(mask: bytes) -> list[int]:
    """The tokens that a mask allows."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    ids: list[int] = bits.nonzero()[0].tolist()
    return ids


def _told(error: Exception) -> Failure:
    fault = Fault.REQUEST if isinstance(error, RequestError) else Fault.ENGINE
    return Failure(str(error) or type(error).__name__, fault)
