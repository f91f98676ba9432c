"""pick: the target's own token after each position, for prefill and verify alike.

The head runs in here, a chunk of positions at a time, so the logits of a whole pass need not exist at
once ([T, V] float32 is 622 MB for 1,024 tokens and a vocabulary of 152 thousand; where options make
several such copies a chunk is 128 positions, else what `rows_of_logits` says). A row's token is
the argmax of its processed logits (`process`) plus its keyed noise (`noise`); at temperature 0 the
noise is absent. Ties go to the lowest id.

On a CPU every position is picked by itself on the host's side of things (`rowwise`): the options of
its own row only, noise only for tokens that survive the filters. Elsewhere a chunk is one sequence
of device operations with no read of a device value: kernels of our own where they run (`device`), else
`choose`, which is the definition of all of them.

Letters: M positions, H hidden size, V vocabulary, A path length, K top log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.device import rows_of_logits
from paceline.core.tree import NOT_FINITE
from paceline.ops.dispatch import implementation
from paceline.ops.reference import sampling as ops
from paceline.sample import options as opt
from paceline.sample.noise import gumbel, hash_tokens, noise_words_of
from paceline.sample.process import edit, filter_tokens, temper
from paceline.sample.rowwise import argmax_rows, draw, score

if TYPE_CHECKING:
    from paceline.sample.options import SamplingTable

Head = Callable[[Tensor], Tensor]  # hidden [m, H] -> logits [m, V] float32 or wider

CHUNK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PickNodes:
    """What is picked: one entry per position.

    `allowed` are a grammar's bits, lowest bit first, for each position by itself.
    """

    rows: Tensor  # [M] int64
    positions: Tensor  # [M] int64 absolute position of the token to be emitted
    num_output: Tensor  # [M] int64 tokens emitted before it
    path_tokens: Tensor  # [M, A] int64 tokens below the root on the node's own path, -1 padded
    allowed: Tensor | None  # [M, ceil(V / 32)] int32, or None
    host_rows: Sequence[int]  # the distinct rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """The picked tokens. Log-probabilities are of the unprocessed logits.

    They are None where no row of the step asks; a row that did not ask has NaN and -1.
    """

    tokens: Tensor  # [M] int64; NOT_FINITE where the logits allow no choice
    logprobs: Tensor | None = None  # [M] float32 or wider
    top_ids: Tensor | None = None  # [M, K] int64, best first
    top_logprobs: Tensor | None = None  # [M, K]


Chooser = Callable[[Tensor, PickNodes, "SamplingTable"], Picks]


def pick(hidden: Tensor, head: Head, nodes: PickNodes, table: SamplingTable) -> Picks:
    """Pick the target's token at every position.

    Args:
        hidden: [M, H] final hidden states.
        head: hidden [m, H] -> logits [m, V], float32 or wider.
        nodes: where and under which conditions.
        table: the rows' options.
    """
    if hidden.is_cpu:
        return pick_by(choose_host, hidden, head, nodes, table)
    return pick_on_device(hidden, head, nodes, table)


def pick_on_device(hidden: Tensor, head: Head, nodes: PickNodes, table: SamplingTable) -> Picks:
    """`pick` with device operations only, no read of a device value; arguments as there."""
    if hidden.is_cpu:
        return pick_by(choose, hidden, head, nodes, table)
    chooser: Chooser = implementation("pick", hidden.device.type, hidden.dtype)
    chunk = CHUNK
    edited = table.in_play(nodes.host_rows) & opt.EDITS or nodes.allowed is not None
    if chooser is not choose and not edited:
        # Nothing else is as wide as the vocabulary; in parts of nearly one size.
        most = max(CHUNK, rows_of_logits(hidden.device, table.vocab_size))
        parts = max(1, -(-hidden.shape[0] // most))
        chunk = max(1, -(-hidden.shape[0] // parts))
    return pick_by(chooser, hidden, head, nodes, table, chunk)


def pick_by(
    chooser: Chooser,
    hidden: Tensor,
    head: Head,
    nodes: PickNodes,
    table: SamplingTable,
    chunk: int = CHUNK,
) -> Picks:
    """`pick` with a given way to choose from logits, of `chunk` positions; arguments as there."""
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        stop = start + chunk
        logits = head(hidden[start:stop]).detach()
        part = nodes if hidden.shape[0] <= chunk else _slice(nodes, start, stop)
        parts.append(chooser(logits, part, table))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Picks(tokens=hidden.new_empty(0, dtype=torch.int64))
    return Picks(
        tokens=torch.cat([p.tokens for p in parts]),
        logprobs=_join([p.logprobs for p in parts]),
        top_ids=_join([p.top_ids for p in parts]),
        top_logprobs=_join([p.top_logprobs for p in parts]),
    )


def choose(logits: Tensor, nodes: PickNodes, table: SamplingTable) -> Picks:
    """Pick from logits [m, V] with device operations only: the definition."""
    flags = table.in_play(nodes.host_rows)
    work = logits
    if flags & opt.EDITS or nodes.allowed is not None:
        work = edit(
            work,
            nodes.rows,
            nodes.num_output,
            nodes.path_tokens,
            nodes.allowed,
            table,
            flags,
        )
    if flags & opt.NOISE:
        temperature = table.temperature[nodes.rows]
        work = temper(work, temperature)
        if flags & opt.FILTERS:
            work = filter_tokens(work, nodes.rows, table, flags)
        words = noise_words_of(table.key[nodes.rows], nodes.positions)
        noise = gumbel(hash_tokens(table.token_ids, words), work.dtype)
        work = torch.where((temperature > 0).unsqueeze(1), work + noise, work)
    tokens = work.argmax(dim=1)  # NaN counts as largest
    finite = work.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
    if work is not logits:  # what an option hides counts too: options must not decide who fails
        finite = finite & logits.amax(1).isfinite()
    num_top = table.num_logprobs(nodes.host_rows)
    picked = torch.where(finite, tokens, NOT_FINITE)
    if num_top < 0:
        return Picks(tokens=picked)
    logprobs, top_ids, top_logprobs = scored(logits, tokens, min(num_top, logits.shape[1]))
    asks = (table.num_top[nodes.rows] >= 0) & finite
    return Picks(
        tokens=picked,
        logprobs=logprobs.masked_fill(~asks, torch.nan),
        top_ids=top_ids.masked_fill(~asks.unsqueeze(1), -1),
        top_logprobs=top_logprobs.masked_fill(~asks.unsqueeze(1), torch.nan),
    )


def choose_host(logits: Tensor, nodes: PickNodes, table: SamplingTable) -> Picks:
    """`choose` on a CPU, position by position."""
    flags = table.in_play(nodes.host_rows)
    num_top = table.num_logprobs(nodes.host_rows)
    if not flags & opt.PROCESSING and num_top < 0 and nodes.allowed is None:
        return Picks(tokens=argmax_rows(logits))
    rows, positions = nodes.rows.tolist(), nodes.positions.tolist()
    outputs = nodes.num_output.tolist()
    paths = nodes.path_tokens.tolist()
    tokens = torch.tensor(
        [
            draw(
                logits[i],
                row=rows[i],
                position=positions[i],
                num_output=outputs[i],
                path_tokens=paths[i],
                allowed=None if nodes.allowed is None else nodes.allowed[i],
                table=table,
            )
            for i in range(len(rows))
        ],
        dtype=torch.int64,
    )
    if num_top < 0:
        return Picks(tokens=tokens)
    shape = (len(rows), min(num_top, logits.shape[1]))
    logprobs = logits.new_full(shape[:1], torch.nan)
    top_ids = torch.full(shape, -1, dtype=torch.int64)
    top_logprobs = logits.new_full(shape, torch.nan)
    for i, row in enumerate(rows):
        if table.host(row).num_logprobs >= 0 and int(tokens[i]) >= 0:
            logprobs[i], top_ids[i], top_logprobs[i] = score(logits[i], int(tokens[i]), shape[1])
    return Picks(tokens=tokens, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def scored(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under unprocessed logits [m, V] of tokens [m] and of the best `num_top`.

    Returns:
        logprobs [m], top_ids [m, num_top] int64 best first, top_logprobs [m, num_top].
    """
    top = tokens.new_empty(len(tokens), 0)
    if num_top > 0:
        top = ops.best_tokens(logits, num_top)
    values = ops.log_probabilities(logits, torch.cat([tokens.unsqueeze(1), top], dim=1))
    return values[:, 0], top, values[:, 1:]


def _slice(nodes: PickNodes, start: int, stop: int) -> PickNodes:
    return PickNodes(
        rows=nodes.rows[start:stop],
        positions=nodes.positions[start:stop],
        num_output=nodes.num_output[start:stop],
        path_tokens=nodes.path_tokens[start:stop],
        allowed=None if nodes.allowed is None else nodes.allowed[start:stop],
        host_rows=nodes.host_rows,
    )


def _join(parts: list[Tensor | None]) -> Tensor | None:
    real = [p for p in parts if p is not None]
    return torch.cat(real) if real else None
