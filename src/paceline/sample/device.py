"""choose_by_kernels: what `sampler.choose` defines, by kernels that read logits and write tokens.

Masks, bias and penalties stay operations of PyTorch on [m, V], for steps in which a row uses them; all
that comes after reads the rows' options on the device (`ops/triton/pick.py`). Logits of 16 bits are
taken as the float32 numbers they are.

Letters: m positions, V vocabulary, K top log-probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.ops.reference import sampling as ops
from paceline.sample import options as opt
from paceline.sample.process import edit
from paceline.sample.sampler import CHUNK, PickNodes, Picks, choose

if TYPE_CHECKING:
    from paceline.sample.options import SamplingTable


def choose_by_kernels(logits: Tensor, nodes: PickNodes, table: SamplingTable) -> Picks:
    """Pick from logits [m, V]; float64 goes to the definition."""
    if logits.dtype == torch.float64:
        return choose(logits, nodes, table)
    from paceline.ops.triton.pick import Options, pick

    flags = table.in_play(nodes.host_rows)
    work = logits
    if flags & opt.EDITS or nodes.allowed is not None:
        work = edit(
            logits.float(),
            nodes.rows,
            nodes.num_output,
            nodes.path_tokens,
            nodes.allowed,
            table,
            flags,
        )
    tokens = pick(
        logits,
        work,
        nodes.rows,
        nodes.positions,
        Options(
            temperature=table.temperature,
            top_p=table.top_p,
            log_min_p=table.log_min_p,
            top_k=table.top_k,
            keys=table.key,
            noise=bool(flags & opt.NOISE),
            uses_min_p=bool(flags & opt.MIN_P),
            uses_top_k=bool(flags & opt.TOP_K),
            uses_top_p=bool(flags & opt.TOP_P),
        ),
    )
    num_top = table.num_logprobs(nodes.host_rows)
    if num_top < 0:
        return Picks(tokens=tokens)
    asks = (table.num_top[nodes.rows] >= 0) & (tokens >= 0)
    logprobs, top_ids, top_logprobs = _scored(logits, tokens, min(num_top, logits.shape[1]))
    return Picks(
        tokens=tokens,
        logprobs=logprobs.masked_fill(~asks, torch.nan),
        top_ids=top_ids.masked_fill(~asks.unsqueeze(1), -1),
        top_logprobs=top_logprobs.masked_fill(~asks.unsqueeze(1), torch.nan),
    )


def _scored(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sampler.scored` with one read for the sum of exponentials."""
    from paceline.ops.triton.peaks import log_sum_exp

    ids = tokens.clamp(min=0).unsqueeze(1)
    top = tokens.new_empty(len(tokens), 0)
    if num_top > 0:
        # What this keeps is several times as large as its logits.
        top = torch.cat([ops.best_tokens(x.float(), num_top) for x in torch.split(logits, CHUNK)])
    about, rest = log_sum_exp(logits)
    chosen = logits.gather(1, torch.cat([ids, top], dim=1)).float()
    values = chosen - about.unsqueeze(1) - rest.unsqueeze(1)
    return values[:, 0], top, values[:, 1:]
