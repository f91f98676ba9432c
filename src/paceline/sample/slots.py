"""OptionSlots: the vocabulary-sized state of the few rows whose options need it.

Counts of emitted tokens, which tokens the prompt holds, which tokens are banned, and logit biases
are all as wide as the vocabulary. A table of them for every row would be large and almost always
neutral, so P slots are shared by the rows that ask; admission waits for a free one. Slot P is a
spare: rows without a slot point at it, it is neutral, and whatever must go nowhere is counted there.

Letters: P slots, V vocabulary, m rows of a chunk, K bias pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams
from paceline.core.sampling_rules import MAX_BIAS


class OptionSlots:
    """Owner of the slots' tensors; `SamplingTable` is the only caller that writes.

    Args:
        num_slots: P.
        vocab_size: V.
        device: where the tensors live.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        rows = num_slots + 1
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.banned = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        # Biases are pairs: 1,024 of them are less than one dense row. Padding adds 0 to token 0.
        self.bias_ids = torch.zeros(rows, MAX_BIAS, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(rows, MAX_BIAS, dtype=torch.float64, device=device)
        self.num_bias = [0] * rows
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def check(self, params: SamplingParams) -> None:
        """Refuse token ids outside the vocabulary, and masks that leave nothing.

        Raises:
            RequestError: naming the option, what is possible and what to do.
        """
        only = params.allowed_token_ids
        named = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": only or (),
            "banned_token_ids": params.banned_token_ids,
        }
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    msg = (
                        f"{name} names token {token}; this model's tokens are "
                        f"0 ... {self.vocab_size - 1}; remove it"
                    )
                    raise RequestError(msg)
        banned = set(params.banned_token_ids)
        if len(banned) == self.vocab_size or (only is not None and banned.issuperset(only)):
            msg = "banned_token_ids bans every token that is allowed; leave at least one to emit"
            raise RequestError(msg)

    def take(
        self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> int:
        """Fill a free slot from a request and return its number."""
        slot = self._free.pop()
        device = self.counts.device
        self.counts[slot].zero_()
        self._count(slot, output_ids)
        self.in_prompt[slot].zero_()
        self.in_prompt[slot, ids_tensor(set(prompt_ids), self.vocab_size, device)] = True
        only = params.allowed_token_ids
        self.banned[slot].fill_(only is not None)
        if only is not None:
            self.banned[slot, ids_tensor(only, self.vocab_size, device)] = False
        self.banned[slot, ids_tensor(params.banned_token_ids, self.vocab_size, device)] = True
        bias = params.logit_bias
        self.bias_ids[slot].zero_()
        self.bias_values[slot].zero_()
        self.bias_ids[slot, : len(bias)] = torch.tensor(
            list(bias), dtype=torch.int64, device=device
        )
        self.bias_values[slot, : len(bias)] = torch.tensor(
            list(bias.values()), dtype=torch.float64, device=device
        )
        self.num_bias[slot] = len(bias)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot; `take` clears what it held."""
        self._free.append(slot)

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count emitted tokens: slots [B] int64, tokens [B, A] int64, -1 padded."""
        real = tokens >= 0
        where = torch.where(real, slots.unsqueeze(1), self.num_slots)
        ones = torch.ones_like(tokens, dtype=torch.int32)
        self.counts.index_put_((where, tokens.clamp(min=0)), ones, accumulate=True)
        # The spare is every row's "nowhere": it must stay neutral.
        self.counts[self.num_slots].zero_()

    def _count(self, slot: int, token_ids: Sequence[int]) -> None:
        ids = ids_tensor(token_ids, self.vocab_size, self.counts.device)
        self.counts[slot] = torch.bincount(ids, minlength=self.vocab_size).to(torch.int32)


def ids_tensor(
    token_ids: Sequence[int] | set[int], vocab_size: int, device: torch.device
) -> Tensor:
    """Token ids within the vocabulary as [n] int64; what lies outside can never be emitted."""
    inside = [t for t in token_ids if 0 <= t < vocab_size]
    return torch.tensor(inside, dtype=torch.int64, device=device)
