"""What DFlash 2 adds to DFlash's network: convolutions within the block, and a choice that sees its left.

*GroupedConv*: around attention and around the MLP of each layer, every row of a block is mixed with the
rows before it, channel by channel, by a learned kernel plus one that the row itself computes. It is
block-local and keeps no state; context keys are not convolved.

*Selector*: a position's likely tokens are scored once more, given the token chosen before it:
score(k) = logit(k) + <A[previous] * (W h), B[k]>. So the chain is chosen from left to right, though the
network ran once.

Source: the published code of DFlash 2 (z-lab), whose names the checkpoint keeps.

Letters: T tokens, b block size, H hidden size, t taps, G groups, B rows, C candidates, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from paceline.layers.linear import Linear

if TYPE_CHECKING:
    from paceline.draft.dflash_config import ConvConfig, SelectorConfig


@dataclass(frozen=True, slots=True)
class Mixed:
    """Rows before a sublayer, and the kernels for the rows after it."""

    rows: Tensor  # [T, H]
    kernels: Tensor  # [T, t, G]


class GroupedConv(nn.Module):
    """Causal convolutions before and after a sublayer: y[i] = sum over j of kernel_i[j] * x[i - j].

    Args:
        config: taps and channels per group.
        hidden_size: H.
        block_size: b; flat tokens are blocks one after the other.
        dtype: of the parameters.
        device: where they live.
    """

    def __init__(
        self,
        config: ConvConfig,
        hidden_size: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.taps, self.group, self.block = config.taps, config.group, block_size
        groups = hidden_size // config.group
        shape = (2, config.taps, hidden_size)
        self.base_kernel = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.kernel_projection = Linear(
            hidden_size, 2 * config.taps * groups, dtype=dtype, device=device
        )

    def before(self, x: Tensor) -> Mixed:
        """Mix the normed input [T, H] of the sublayer; it also says how to mix its output."""
        kernels = self.kernel_projection(x).view(x.shape[0], 2, self.taps, -1)
        return Mixed(self._convolved(x, kernels[:, 0], 0), kernels[:, 1])

    def after(self, x: Tensor, mixed: Mixed) -> Tensor:
        """Mix the sublayer's output [T, H]."""
        return self._convolved(x, mixed.kernels, 1)

    def _convolved(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        blocks = x.view(-1, self.block, kernels.shape[2], self.group)  # [n, b, G, H / G]
        own = kernels.view(-1, self.block, self.taps, kernels.shape[2], 1)
        base = self.base_kernel[side].view(self.taps, kernels.shape[2], self.group)
        y = (base[0] + own[:, :, 0]) * blocks
        for back in range(1, min(self.taps, self.block)):
            y[:, back:] += (base[back] + own[:, back:, back]) * blocks[:, :-back]
        return y.view(x.shape)


class Selector(nn.Module):
    """How much likelier a candidate is, given the token before it.

    Args:
        config: rank R of the codebooks.
        vocab_size: rows of the codebooks.
        hidden_size: H.
        dtype: of the parameters.
        device: where they live.
    """

    def __init__(
        self,
        config: SelectorConfig,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.top_k = config.top_k
        shape = (vocab_size, config.rank)
        self.predecessors = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.successors = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.hidden_projection = Linear(hidden_size, config.rank, dtype=dtype, device=device)

    def projected(self, hidden: Tensor) -> Tensor:
        """W h of all positions at once: [..., H] to [..., R]."""
        return self.hidden_projection(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)

    def gains(self, projected: Tensor, previous: Tensor, ids: Tensor) -> Tensor:
        """What to add to the logits of candidates [B, C], given the tokens before: [B, C].

        Args:
            projected: [B, R] of this position.
            previous: [B] int64.
            ids: [B, C] int64.
        """
        left = embedding(previous, self.predecessors) * projected
        return (embedding(ids, self.successors) @ left.unsqueeze(-1)).squeeze(-1)
