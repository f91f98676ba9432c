"""A model without weights, and the engine's loop around it in thirty lines.

`ToyModel`'s logits are a function of the tokens before, through a hash, so a wrong path, a wrong
depth or a leaked neighbour changes them. A "hidden state" is the number of a text. `decode` runs
propose, select, verify and commit for several rows with any trees and either verifier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.tree import Proposal, Verdict, from_proposals
from paceline.ops.reference.tree import select
from paceline.sample.options import SamplingTable
from tests.oracle.sampling import words
from tests.oracle.tree import ancestors

Verify = Callable[..., Verdict]
Propose = Callable[[Sequence[int]], Proposal]


@dataclass
class ToyModel:
    """Logits [V] of every text, drawn once from a generator seeded by the text."""

    vocab: int
    dtype: torch.dtype = torch.float64
    spread: float = 2.0
    texts: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    table: list[Tensor] = field(default_factory=list)

    def hidden(self, text: Sequence[int]) -> int:
        """The number of a text; its logits exist afterwards."""
        key = tuple(text)
        if key not in self.numbers:
            self.numbers[key] = len(self.texts)
            self.texts.append(key)
            gen = torch.Generator().manual_seed(random.Random(str(key)).getrandbits(40))
            logits = torch.randn(self.vocab, generator=gen, dtype=torch.float64) * self.spread
            self.table.append(logits.to(self.dtype))
        return self.numbers[key]

    def head(self, hidden: Tensor) -> Tensor:
        """[m, 1] -> [m, V]."""
        return torch.stack([self.table[int(i)] for i in hidden.view(-1)])


@dataclass
class Row:
    """One request of `decode`."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    stop_ids: tuple[int, ...] = ()
    propose: Propose = lambda text: Proposal()
    grammar: Callable[[Sequence[int]], set[int]] | None = None
    output: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def decode(
    model: ToyModel,
    rows: Sequence[Row],
    verify: Verify,
    *,
    rng: random.Random | None = None,
    slots: int = 8,
) -> None:
    """Run every row to its end; `output`, `counts` and `logprobs` are filled in.

    `rng`, if given, picks caps, batch budgets and the rows that take part in each step, and
    preempts some: their device state is thrown away and made again from the tokens.
    """
    table = SamplingTable(len(rows), model.vocab, "cpu", slots)
    for r, row in enumerate(rows):
        first = _first(model, table, r, row)
        row.output = [first]
        if first in row.stop_ids or row.params.max_tokens == 1:
            table.live[r] = False
    while bool(table.live.any()):
        going = [r for r in range(len(rows)) if bool(table.live[r])]
        if rng is not None and rng.random() < 0.5:
            going = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))  # dead ones too
        if rng is not None and rng.random() < 0.2:
            _preempt(table, rng.choice(going), rows)
        _step(model, table, rows, going, verify, rng)


def _preempt(table: SamplingTable, r: int, rows: Sequence[Row]) -> None:
    """Throw the row's device state away and bring it back from the host's tokens."""
    was_live = bool(table.live[r])
    table.release(r)
    _assign(table, r, rows[r])
    table.live[r] = was_live


def _assign(table: SamplingTable, r: int, row: Row) -> None:
    table.assign(
        r,
        row.params,
        seed=row.seed,
        sample_index=row.sample_index,
        prompt_ids=row.prompt,
        output_ids=row.output,
        stop_ids=row.stop_ids,
        limit=len(row.prompt) + row.params.max_tokens,
    )


def _first(model: ToyModel, table: SamplingTable, r: int, row: Row) -> int:
    from paceline.sample.sampler import PickNodes, pick

    _assign(table, r, row)
    at = torch.tensor([r])
    picks = pick(
        torch.tensor([[float(model.hidden(row.prompt))]], dtype=torch.float64),
        model.head,
        PickNodes(
            rows=at,
            positions=torch.tensor([len(row.prompt)]),
            num_output=torch.tensor([0]),
            path_tokens=torch.empty(1, 0, dtype=torch.int64),
            allowed=None if row.grammar is None else words([row.grammar(())], model.vocab),
            host_rows=[r],
        ),
        table,
    )
    table.commit(at, picks.tokens.view(1, 1), [r])
    if picks.logprobs is not None:
        row.logprobs.append(float(picks.logprobs[0]))
    return int(picks.tokens[0])


def _step(
    model: ToyModel,
    table: SamplingTable,
    rows: Sequence[Row],
    going: list[int],
    verify: Verify,
    rng: random.Random | None,
) -> None:
    texts = [rows[r].prompt + rows[r].output for r in going]
    props = [rows[r].propose(t) for r, t in zip(going, texts, strict=True)]
    tree = from_proposals([t[-1] for t in texts], props)
    tree.check()
    caps, budget = [99] * len(going), tree.token_ids.numel()
    if rng is not None:
        caps = [rng.choice([0, 1, 3, 99]) for _ in going]
        budget = rng.randint(len(going), budget)
    ids = torch.tensor(going)
    chosen = select(tree, ids, budget, torch.tensor(caps))
    width = tree.token_ids.shape[1]
    hidden, allowed = [], []
    for flat in chosen.node.tolist():
        b, node = divmod(flat, width)
        below = [props[b].tokens[n - 1] for n in reversed(ancestors(props[b], node)[:-1])]
        hidden.append([float(model.hidden(texts[b] + below))])
        grammar = rows[going[b]].grammar
        out = rows[going[b]].output + below
        allowed.append(set(range(model.vocab)) if grammar is None else grammar(out))
    lens = torch.tensor([len(t) - 1 for t in texts])
    has_grammar = any(rows[r].grammar for r in going)
    verdict = verify(
        tree,
        chosen,
        torch.tensor(hidden, dtype=torch.float64),
        model.head,
        table,
        ids,
        lens,
        going,
        words(allowed, model.vocab) if has_grammar else None,
    )
    emitted = torch.full_like(verdict.path_tokens, -1)
    for b, r in enumerate(going):
        count = int(verdict.count[b])
        assert bool(table.live[r]) == (count > 0)
        if not count:
            continue
        tokens = [*verdict.path_tokens[b, 1:count].tolist(), int(verdict.next_token[b])]
        emitted[b, :count] = torch.tensor(tokens)
        rows[r].output += tokens
        rows[r].counts.append(count)
        if rows[r].params.logprobs is not None:
            assert verdict.logprobs is not None
            rows[r].logprobs += verdict.logprobs[b, :count].tolist()
        table.live[r] = verdict.alive[b]
    table.commit(ids, emitted, going)
