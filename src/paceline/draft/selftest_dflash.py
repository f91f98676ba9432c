"""DFlash drafters under test: which readings their files allow, and what each of them drafts.

Nothing in the tensors tells whether a row predicts its own place or the one after it
(`sample_from_anchor`), whether rows see later ones (`is_causal`), or how taps are counted.

Letters: T tokens, n places, b block size, K proposed tokens, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.draft.dflash import load_net
from paceline.draft.dflash_net import block_tokens
from paceline.draft.selftest import Reading, Text, shifted
from paceline.draft.selftest_static import dflash_findings
from paceline.draft.teacher_forcing import BlocksAttend, text_pass

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.draft.base import TargetInfo

_CHUNK = 64  # places whose blocks are run at the same time
_OWN = "as configured"


class DFlashSubject:
    """See `Subject`.

    Args:
        config: `model` is the drafter's folder.
        target: facts, embedding and head of the target.

    Raises:
        ConfigError: no folder is given, or the drafter does not belong to the target.
        ModelError: its files are missing, damaged or of a layout that is not supported.
    """

    def __init__(self, config: DraftConfig, target: TargetInfo) -> None:
        self._net = load_net(config, target)
        self._target = target
        self.findings = dflash_findings(self._net.config, target)
        own = self._net.config
        self._own_anchor, self._own_causal = own.sample_from_anchor, any(own.causal)
        self._layout = f"sample_from_anchor {str(not self._own_anchor).lower()}"
        self._mask = f"is_causal {str(not self._own_causal).lower()}"

    def readings(self) -> Sequence[Reading]:
        """See `Subject`."""
        taps = self._net.config.target_layer_ids
        layers = self._target.config.num_layers
        flips = [(self._mask, f"Set {self._mask.replace(' ', ': ')} at the top level.")]
        if self._net.config.block_size > 1:
            flips.append((self._layout, f"Set {self._layout.replace(' ', ': ')} in dflash_config."))
        return [
            Reading(name=_OWN, change="", taps=taps),
            *shifted(taps, layers, "dflash_config.target_layer_ids"),
            *(Reading(name=name, change=change, taps=taps) for name, change in flips),
        ]

    def draft(
        self, reading: Reading, text: Text, features: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Subject`."""
        net, config = self._net, self._net.config
        device = self._target.device
        tokens = torch.tensor(text.tokens, device=device)
        aux = torch.cat([features[layer] for layer in reading.taps], dim=-1)
        context = net.context(aux, torch.arange(len(tokens), device=device))
        anchor = self._own_anchor != (reading.name == self._layout)
        causal = not self._own_causal if reading.name == self._mask else None
        first = 0 if anchor else 1
        drafts = []
        places = torch.arange(text.num_prompt, len(tokens) - 1, device=device)
        row = torch.arange(config.block_size, device=device)
        for starts in torch.split(places, _CHUNK):
            ids = block_tokens(config, tokens[starts])
            positions = starts[:, None] + row
            attend = BlocksAttend(context, starts, config.block_size, causal)
            hidden = net(text_pass(ids.view(-1), positions.view(-1)), attend).hidden
            hidden = hidden.view(len(starts), config.block_size, -1)[:, first:]
            drafts.append(self._best(hidden, tokens[starts]))
        at = places[:, None] + torch.arange(1, config.block_size - first + 1, device=device)
        truth = torch.where(at < len(tokens), tokens[at.clamp(max=len(tokens) - 1)], -1)
        return torch.cat(drafts), truth

    def vocabulary(self, texts: Sequence[tuple[Text, Mapping[int, Tensor]]]) -> None:
        """The head is the target's: there is no map."""

    def _best(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Likeliest tokens [n, K] of hidden states [n, K, H]; DFlash 2 chooses from left to right."""
        logits = self._net.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        selector = self._net.selector
        if selector is None:
            return logits.argmax(-1)
        top, ids = logits.topk(selector.top_k, dim=-1)
        projected = selector.projected(hidden)
        before, chosen = roots, []
        for position in range(hidden.shape[1]):
            mine = ids[:, position]
            scores = top[:, position] + selector.gains(projected[:, position], before, mine)
            before = mine.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
            chosen.append(before)
        return torch.stack(chosen, dim=1)
