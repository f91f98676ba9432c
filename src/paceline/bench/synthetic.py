"""SyntheticWalk: accepts as much of every tree as it was told to, whatever the target says.

Random weights draft nonsense, so nothing would ever be accepted, and a run would not show what a step
does with accepted tokens. The verify pass and the real walk run as they do; only their outcome is
replaced. What such an engine emits is no text and no measure of a drafter, so this is passed in by
`paceline bench steps` and by nobody else: `Engine.build` knows nothing of it.

A row accepts its i-th draft token in the share `rates[i]` of its steps, whichever tokens these are: at
each step all those whose rate is above the row's next number of a sequence that fills 0 ... 1 evenly
(the golden ratio's multiples). No chance is involved, so means are met within a few steps. Accepted is
the path from the root to the deepest verified node; where a tree ends earlier, less is accepted.

All on the device, fixed shapes, state updated in place: a captured step goes on with it.

Letters: B rows, N nodes a tree, T selected nodes, A path length, R row capacity.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.request import Grammar
from paceline.core.tree import DraftTree, Selection, Verdict
from paceline.sample.options import SamplingTable
from paceline.sample.sampler import Head
from paceline.sample.verifier import verify

_GOLDEN = 0.6180339887498949
_APART = 0.7548776662466927  # between the first numbers of neighbouring rows
_WORD = 64


class SyntheticWalk:
    """A `Walk` with an outcome that was said beforehand.

    Args:
        rates: share of steps in which each draft token is accepted, first to last; not rising.
        num_rows: R.
        device: of the rows.
    """

    def __init__(self, rates: Sequence[float], *, num_rows: int, device: torch.device) -> None:
        self._rates = torch.tensor(rates, dtype=torch.float64, device=device)
        rows = torch.arange(num_rows + 1, dtype=torch.float64, device=device)
        self._phase = rows * _APART % 1.0  # [R+1]

    def __call__(
        self,
        tree: DraftTree,
        selection: Selection,
        hidden: Tensor,
        head: Head,
        table: SamplingTable,
        rows: Tensor,
        lens: Tensor,
        host_rows: Sequence[int],
        allowed: Tensor | None = None,
        grammars: Sequence[Grammar | None] = (),
        /,
    ) -> Verdict:
        """Walk, and replace where the walk ended. Nobody may have asked for log-probabilities."""
        assert allowed is None, "a path of given lengths obeys no grammar"
        assert not grammars, "the same"
        told = verify(tree, selection, hidden, head, table, rows, lens, host_rows)
        assert told.logprobs is None, "a synthetic path has no log-probabilities"
        phase = self._phase[rows]
        self._phase[rows] = (phase + _GOLDEN) % 1.0
        wanted = 1 + (phase.unsqueeze(1) < self._rates).sum(1)
        room = table.limits[rows] - lens - 1  # tokens that the row may still emit
        wanted = torch.minimum(wanted, room.clamp(min=1)).masked_fill(told.count == 0, 0)
        path = _deepest(tree, selection)
        path = path[:, : told.path.shape[1]]
        step = torch.arange(path.shape[1], device=path.device)
        path = path.masked_fill(step >= wanted.unsqueeze(1), -1)
        taken = path >= 0
        count = taken.sum(1)
        node = selection.node[selection.cu_q[:-1].unsqueeze(1) + path.clamp(min=0)]
        tokens = tree.token_ids.reshape(-1)[node.clamp(min=0)]
        goes_on = (told.next_token >= 0) & (count < room)
        return Verdict(
            path=path,
            path_tokens=tokens.masked_fill(~taken, -1),
            count=count,
            next_token=told.next_token,
            alive=(count > 0) & goes_on,
        )


def _deepest(tree: DraftTree, selection: Selection) -> Tensor:
    """[B, N] the path to each row's deepest selected node, as selected indices in the row, -1 padded."""
    batch, width = tree.token_ids.shape
    node, total = selection.node, selection.node.shape[0]
    device = node.device
    flat = node.clamp(min=0)
    owner = torch.where(node < 0, batch, torch.div(flat, width, rounding_mode="floor"))
    # Of equally deep ones the first: the key falls with the place.
    order = total - 1 - torch.arange(total, device=device)
    key = tree.depths.reshape(-1)[flat] * total + order
    best = torch.full((batch + 1,), -1, dtype=torch.int64, device=device)
    best = best.scatter_reduce_(0, owner, key, reduce="amax")[:batch]
    leaf = total - 1 - best.clamp(min=0) % total
    place = torch.arange(width, device=device)
    words = selection.mask[leaf][:, torch.div(place, _WORD, rounding_mode="floor")]
    on_path = ((words >> (place % _WORD)) & 1).bool() & (best >= 0).unsqueeze(1)
    # Ancestors come before descendants, so the r-th set bit is the path's r-th node.
    rank = torch.where(on_path, on_path.cumsum(1) - 1, width)
    out = torch.full((batch, width + 1), -1, dtype=torch.int64, device=device)
    return out.scatter_(1, rank, place.expand(batch, -1))[:, :width]


def rates_of(accept_length: float) -> tuple[float, ...]:
    """Rates with that mean number of emitted tokens a step, in the fewest different ways."""
    drafted = accept_length - 1.0
    whole = int(drafted)
    rest = drafted - whole
    return (*([1.0] * whole), *([rest] if rest > 0 else []))


def rates_asked(length: float | None, text: str | None) -> tuple[float, ...] | None:
    """Synthetic acceptance as rates; None: real.

    Raises:
        ConfigError: both are given, or one is malformed or out of range.
    """
    if length is not None and text is not None:
        msg = "--accept-length and --accept-rates both say what is accepted; give one of them"
        raise ConfigError(msg)
    if length is not None:
        if not 1.0 <= length <= 256.0:
            msg = f"--accept-length {length:g} must be 1 (nothing accepted) to 256 tokens a step"
            raise ConfigError(msg)
        return rates_of(length)
    if text is None:
        return None
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (-1.0,)
    falling = all(a >= b for a, b in itertools.pairwise(rates))
    if not falling or not all(0.0 <= rate <= 1.0 for rate in rates):
        msg = (
            f"cannot read --accept-rates {text!r}; give numbers of 0 to 1 that do not rise, with "
            "commas, for example .8,.6,.4"
        )
        raise ConfigError(msg)
    return rates
