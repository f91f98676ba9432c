"""Logits and options that are difficult to pick from, and the definition to compare a pick with.

Used in Triton's interpreter (`tests/interpreted/triton_pick.py`) and on a GPU (`tests/gpu/test_pick.py`).

A pick must be the definition's. Two things may differ for a reason, and only by so much: a score, since
noise is computed by other logarithms (`SCORE`), and where a nucleus ends, since its mass is computed by
another exponential (`MASS`).

Letters: m rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.ops.reference import sampling as reference
from paceline.sample import options as opt
from paceline.sample.noise import gumbel, hash_tokens, noise_words_of
from paceline.sample.options import SamplingTable
from paceline.sample.process import edit, temper
from paceline.sample.sampler import PickNodes, choose

SCORE = 2.0**-19  # of a score, or of 1 if that is more: 16 steps of float32
MASS = 2.0**-18  # of the mass of a row

MIX = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(top_k=5),
    SamplingParams(min_p=0.2, temperature=0.7),
    SamplingParams(top_p=0.5, min_p=0.05),
    SamplingParams(top_k=70, top_p=0.7, temperature=2.0),
    SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5),
    SamplingParams(top_p=0.05),
    SamplingParams(top_k=1, temperature=1e-4),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_k=2000, top_p=0.99),
]
EDITED = [
    SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(temperature=0.7, logit_bias={5: 4.0, 60: 3.0}, banned_token_ids=[7]),
    SamplingParams(temperature=0.5, min_tokens=50, top_p=0.9),
    SamplingParams(temperature=0, min_tokens=50, allowed_token_ids=[40, 41, 3]),
    SamplingParams(temperature=0, frequency_penalty=0.5),
]
SCORED = [SamplingParams(logprobs=0), SamplingParams(temperature=0, logprobs=5), SamplingParams()]
KINDS = ("equal", "flat", "steep", "ties", "masked", "faults")


def table_of(params: list[SamplingParams], vocab_size: int, device: str) -> SamplingTable:
    """A table whose row i has params[i]; 20 stop ids, more than the device's columns hold."""
    num = len(params)
    table = SamplingTable(num, vocab_size, device, num)
    for row, given in enumerate(params):
        put(table, row, given)
    table.apply()
    return table


def put(table: SamplingTable, row: int, params: SamplingParams) -> None:
    """Give a row to a request."""
    table.assign(
        row,
        params,
        seed=row,
        sample_index=row % 3,
        prompt_ids=[1, 2, 3],
        output_ids=[row % table.vocab_size],
        stop_ids=range(40, 60),
        limit=10**6,
    )


def mixed(params: list[SamplingParams], rows: int) -> list[SamplingParams]:
    """`rows` rows that take the options in turn."""
    return [params[row % len(params)] for row in range(rows)]


def nodes_of(rows: list[int], device: str, seed: int = 0) -> PickNodes:
    """Nodes of these rows at positions that differ."""
    return PickNodes(
        rows=torch.tensor(rows, device=device),
        positions=torch.tensor([4 + seed * 97 + r % 5 for r in rows], device=device),
        num_output=torch.tensor([1 + r % 3 for r in rows], device=device),
        path_tokens=torch.tensor([[r % 90, -1] for r in rows], device=device),
        allowed=None,
        host_rows=sorted(set(rows)),
    )


def logits_of(kind: str, rows: int, vocab_size: int, seed: int) -> Tensor:
    """[rows, V] float32 on the CPU."""
    x = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    if kind == "equal":
        return x * 0
    if kind == "flat":
        return x * 0.5
    if kind == "ties":
        return (x * 4).round() / 2
    x = x * 4
    if kind == "masked":
        x[:, ::3] = -math.inf
        x[rows // 2] = -math.inf
        x[rows // 2, vocab_size // 2] = 1.0
    if kind == "faults":
        x[0::4, vocab_size - 1] = math.nan
        x[1::4, vocab_size // 3] = math.inf
        x[2::8] = -math.inf
        x[-1, 0::2] = -0.0  # equal to 0
        x[-1, 1::2] = 0.0
    return x


def differences(found: Tensor, logits: Tensor, nodes: PickNodes, table: SamplingTable) -> list[str]:
    """Rows whose token is not the definition's, without a reason."""
    logits = logits.float()
    want = choose(logits, nodes, table).tokens
    differ: list[int] = (found != want).nonzero().view(-1).tolist()
    return [
        f"row {i}: {int(found[i])} instead of {int(want[i])}"
        for i in differ
        if not _explained(i, int(found[i]), int(want[i]), logits, nodes, table)
    ]


def _explained(
    i: int, found: int, want: int, logits: Tensor, nodes: PickNodes, table: SamplingTable
) -> bool:
    """Whether rounding may choose `found` where the definition has `want`."""
    if min(found, want) < 0 or found >= table.vocab_size:
        return False
    flags = table.in_play(nodes.host_rows)
    rows = nodes.rows[i : i + 1]
    work = edit(
        logits[i : i + 1],
        rows,
        nodes.num_output[i : i + 1],
        nodes.path_tokens[i : i + 1],
        None,
        table,
        flags,
    )
    temperature = table.temperature[rows]
    if float(temperature) == 0:
        return False
    work = temper(work, temperature)
    words = noise_words_of(table.key[rows], nodes.positions[i : i + 1])
    scores = (work + gumbel(hash_tokens(table.token_ids, words), work.dtype))[0].double()
    if flags & opt.MIN_P:
        work = reference.keep_min_p(work, table.log_min_p[rows])
    if flags & opt.TOP_K:
        ranked = torch.sort(work, dim=1, descending=True).values
        work = reference.keep_best(work, ranked, table.top_k[rows])
    if not bool((work[0, [found, want]] > -math.inf).all()):
        return False
    gap = float((scores[found] - scores[want]).abs())
    if gap <= SCORE * max(1.0, float(scores[want].abs())):
        return True
    # The better of the two lies at the nucleus' end.
    better = found if scores[found] > scores[want] else want
    weight = reference.mass(work, work.amax(1, keepdim=True))[0]
    value, ids = work[0, better], torch.arange(work.shape[1], device=work.device)
    before = (work[0] > value) | ((work[0] == value) & (ids < better))
    share = float(weight[before].sum()) / float(weight.sum())
    return abs(share - float(table.top_p[rows])) <= MASS
