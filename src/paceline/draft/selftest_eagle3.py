"""EAGLE-3 drafters under test: which readings their files allow, and what each of them drafts.

Norms with weights of their own show in the tensors. What does not: how taps are counted, whether the
residual stream starts from the normed feature (`norm_before_residual`), and whether the feature that is
fed back has passed the final norm (`norm_output`, which shows from the second draft on).

Letters: T tokens, n places, K drafts, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.draft import checkpoint_folder, eagle3_votes
from paceline.draft.eagle3_checkpoint import load
from paceline.draft.selftest import Reading, Text, shifted
from paceline.draft.selftest_static import eagle3_findings
from paceline.draft.teacher_forcing import ChainsAttend

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.draft.base import TargetInfo
    from paceline.draft.eagle3_net import Eagle3Net

_STEPS = 5  # drafts of a place


class Eagle3Subject:
    """See `Subject`.

    Args:
        config: `model` is the drafter's folder.
        target: facts and embedding of the target.

    Raises:
        ConfigError: no folder is given, or the drafter does not belong to the target.
        ModelError: its files are missing, damaged or of a layout that is not supported.
    """

    def __init__(self, config: DraftConfig, target: TargetInfo) -> None:
        self._net = load(checkpoint_folder.locate(config), target)
        self._target = target
        self.findings = eagle3_findings(self._net.config, target)
        own = self._net.config
        residual, output = not own.norm_before_residual, not own.norm_output
        self._flips = {  # a reading's name -> what is read
            f"norm_before_residual {str(residual).lower()}": replace(
                own, norm_before_residual=residual
            ),
            f"norm_output {str(output).lower()}": replace(own, norm_output=output),
        }

    def readings(self) -> Sequence[Reading]:
        """See `Subject`."""
        taps, layers = self._net.config.aux_layers, self._target.config.num_layers
        return [
            Reading(name="as configured", change="", taps=taps),
            *shifted(taps, layers, "eagle_aux_hidden_state_layer_ids"),
            *(
                Reading(name=name, change=f"Set {name.replace(' ', ': ')}.", taps=taps)
                for name in self._flips
            ),
        ]

    def draft(
        self, reading: Reading, text: Text, features: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Subject`."""
        rows, truth = self._rows(reading, text, features, _STEPS)
        return self._net.d2t[rows], truth

    def vocabulary(
        self, texts: Sequence[tuple[Text, Mapping[int, Tensor]]]
    ) -> eagle3_votes.Findings | None:
        """See `Subject`."""
        own = self.readings()[0]
        parts = [self._rows(own, text, features, 1) for text, features in texts]
        rows, tokens = (torch.cat(part)[:, 0].cpu().numpy() for part in zip(*parts, strict=True))
        d2t = self._net.d2t.cpu().numpy()
        return eagle3_votes.compare(rows, tokens, d2t, self._net.config.vocab_size)

    def _rows(
        self, reading: Reading, text: Text, features: Mapping[int, Tensor], steps: int
    ) -> tuple[Tensor, Tensor]:
        """Likeliest rows of the head [n, K] for every place, and the text's tokens there.

        Entry i pairs the feature of place i with the token after it, and says what comes then; later
        steps are fed the text's tokens.
        """
        net = self._read_as(reading)
        device = self._target.device
        tokens = torch.tensor(text.tokens, device=device)
        places = torch.arange(len(tokens) - 1, device=device)
        asked = places[text.num_prompt - 1 : len(tokens) - 2]
        aux = torch.cat([features[layer] for layer in reading.taps], dim=-1)
        feature, attend = net.project(aux)[:-1], ChainsAttend()
        rows, truth = [], []
        for step in range(steps):
            token = tokens[(places + 1 + step).clamp(max=len(tokens) - 1)]
            out = net.layer(net.embed(token), feature, places + step, attend)
            rows.append(net.logits(out[asked]).argmax(-1))
            at = asked + 2 + step
            after = tokens[at.clamp(max=len(tokens) - 1)]
            truth.append(torch.where(at < len(tokens), after, -1))
            feature = net.fed_back(out)
        return torch.stack(rows, dim=1), torch.stack(truth, dim=1)

    def _read_as(self, reading: Reading) -> Eagle3Net:
        """The network with one flag flipped; its weights are shared."""
        config = self._flips.get(reading.name)
        if config is None:
            return self._net
        other = copy(self._net)
        other.config = config
        return other
