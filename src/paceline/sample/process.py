"""One processing of logits for prefill and verify alike: every option, in one order.

Order: allowed and banned tokens and the grammar's bits, min_tokens, logit_bias, penalties over the
node's own path, temperature, min_p, top_k, top_p. What a filter drops is -inf afterwards. Options
that a row does not use are neutral numbers in its columns, which change no bit; an option that no
row of the step uses (`flags`) is not computed.

Letters: m rows of a chunk, V vocabulary, A path length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.ops.reference import sampling as ops
from paceline.sample import options as opt

if TYPE_CHECKING:
    from paceline.sample.options import SamplingTable


def edit(
    logits: Tensor,
    rows: Tensor,
    num_output: Tensor,
    path_tokens: Tensor,
    allowed: Tensor | None,
    table: SamplingTable,
    flags: int,
) -> Tensor:
    """Masks, min_tokens, bias and penalties: what comes before the temperature.

    Args:
        logits: [m, V] float32 or float64; not changed.
        rows: [m] int64 row ids.
        num_output: [m] int64 tokens emitted before the one that is picked.
        path_tokens: [m, A] int64 tokens below the root on the node's path, -1 padded.
        allowed: [m, ceil(V / 32)] int32 grammar bits, or None.
        table: the rows' options.
        flags: options in play.

    Returns:
        [m, V], the same tensor where nothing applied.
    """
    slots, size = table.slots, logits.shape[1]
    slot = table.slot[rows] if flags & (opt.MASK | opt.BIAS | opt.PENALTY) else rows
    if flags & opt.MASK:
        logits = logits.masked_fill(slots.banned[slot], ops.NEG_INF)
    if allowed is not None:
        logits = logits.masked_fill(~ops.unpack_bits(allowed, size), ops.NEG_INF)
    if flags & opt.MIN_TOKENS:
        early = num_output < table.min_tokens[rows]
        logits = ops.ban(logits, table.stop_ids[rows], early)
        if flags & opt.FAR_STOPS:  # rows without any have no bits there
            logits = ops.ban_bits(logits, table.far_stops(rows), early)
    if flags & opt.BIAS:
        logits = ops.add_bias(logits, slots.bias_ids[slot], slots.bias_values[slot])
    if flags & opt.PENALTY:
        logits = ops.penalize(
            logits,
            slots.counts[slot],
            slots.in_prompt[slot],
            path_tokens,
            table.repetition[rows],
            table.presence[rows],
            table.frequency[rows],
        )
    return logits


def temper(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide logits [m, V] by temperature [m] float64; rows at temperature 0 stay as they are."""
    scale = torch.where(temperature > 0, temperature, 1.0)
    return logits / scale.to(logits.dtype).unsqueeze(1)


def filter_tokens(logits: Tensor, rows: Tensor, table: SamplingTable, flags: int) -> Tensor:
    """min_p, then top_k, then top_p of what they left: logits [m, V], rows [m] -> [m, V]."""
    if flags & opt.MIN_P:
        logits = ops.keep_min_p(logits, table.log_min_p[rows])
    if flags & opt.TOP_K:
        ranked = torch.sort(logits, dim=1, descending=True).values
        logits = ops.keep_best(logits, ranked, table.top_k[rows])
    if flags & opt.TOP_P:
        ranked = torch.sort(logits, dim=1, descending=True).values
        logits = ops.keep_best(logits, ranked, ops.nucleus_size(ranked, table.top_p[rows]))
    return logits
