"""EAGLE-3: a chain or a tree, drafted token by token by one layer (Li et al.; arXiv 2503.01840).

`observe` turns the target's tapped features of every token that became final, and the token after it,
into one draft key and value at the target's own slot; guesses are thereby overwritten with true features
after each verify. An entry depends on nothing else (`eagle3_net.py`), so observing is three products per
token, and where nothing is drafted nothing more is computed.

`propose` starts at each row's newest entry, whose feature is kept, and runs the layer once per level of
the tree: the first pass asks the newest entry for the root's children, each further one asks those that
are looked at for theirs (`eagle3_growth.py`). Their keys are scratch behind the known ones.

Children are ranked, and survive, as in `candidates.py`: at temperature 0 by the drafter's probabilities,
at others with the target's own noise for the token that a draft id stands for. A token that cannot be
drafted is the part of the target's choices that is never held; calibration learns it with the rest.

No value is read by the host on a GPU.

Letters: B rows, k nodes of a level, T tokens, F width of the features, H hidden size, Vd draft
vocabulary, C candidates, P levels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.errors import ConfigError
from paceline.draft import checkpoint_folder
from paceline.draft.base import DrafterSpec
from paceline.draft.candidates import SAMPLED, Calibration, Candidates, batches, rank
from paceline.draft.eagle3_checkpoint import load
from paceline.draft.eagle3_growth import Growth, Level, along, num_children
from paceline.ops import drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.config import DraftConfig
    from paceline.core.tree import DraftTree
    from paceline.draft.base import Commit, DraftRuntime, TargetInfo

SOURCE = 5  # in `DraftTree.sources`
_GREEDY = 16  # candidates of a greedy node, at least: its children, and some to learn from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A proposal that the next commit of the same rows judges."""

    rows: Tensor  # [B]
    temperature: Tensor  # [B]
    levels: Sequence[Level]
    found: Sequence[Candidates]  # [B, k, C] of each level's nodes


class Eagle3Drafter:
    """A chain (`eagle_topk` 1) or the best tree per row.

    Args:
        config: `model` is the drafter's folder, `num_speculative_tokens` the most nodes,
            `eagle_num_steps` the deepest level, `eagle_topk` the children of a node: of more than there
            are nodes none could be proposed, so they are not looked at.
        target: facts and embedding of the target.

    Raises:
        ConfigError: a setting is out of range, no folder is given, or the drafter does not belong to
            the target.
        ModelError: its files are missing, damaged or of a layout that is not supported.
    """

    def __init__(self, config: DraftConfig, target: TargetInfo) -> None:
        for name in ("eagle_topk", "eagle_num_steps"):
            value = getattr(config, name)
            if value < 1:
                msg = f"{name} is {value}; 1 or more is needed. Leave it out for its default."
                raise ConfigError(msg)
        self.net = load(checkpoint_folder.locate(config), target)
        self._depth = min(config.eagle_num_steps, config.num_speculative_tokens)
        most = max(1, config.num_speculative_tokens)
        self._width = min(config.eagle_topk, most, self.net.config.draft_vocab_size)
        self._budget = min(config.num_speculative_tokens, num_children(self._width, self._depth))
        self._calibration = Calibration(self._depth, target.device)
        self._device = target.device
        self._asked: _Asked | None = None
        self.spec = DrafterSpec(
            name="eagle3",
            max_nodes=1 + self._budget,
            max_depth=self._depth,
            on_host=False,
            sources={SOURCE: "eagle3"},
            source=SOURCE,
            aux_layers=self.net.config.aux_layers,
            kv=self.net.config.kv,
            lookahead=1,
            scratch=max(0, self._depth - 1) * self._width,
        )

    def attach(self, runtime: DraftRuntime) -> None:
        """See `Drafter`."""
        self._runtime = runtime
        size = (runtime.num_rows + 1, self.net.config.hidden_size)
        # Of each row's newest entry.
        self._features = torch.zeros(size, dtype=self.net.dtype, device=self._device)

    @torch.inference_mode()
    def observe(self, commit: Commit) -> None:
        """Cache the true entries of what became final; learn from what was emitted."""
        assert commit.hidden is not None, "the target is tapped"
        features = self.net.project(commit.hidden)
        k, v = self.net.context(self.net.embed(commit.next_ids), features, commit.positions)
        self._runtime.write(0, commit.slots, k, v)
        newest = (commit.cu[1:] - 1).clamp(min=0)
        rows = torch.where(commit.cu.diff() > 0, commit.rows, self._runtime.num_rows)
        self._features.index_copy_(0, rows, features[newest])
        asked, self._asked = self._asked, None
        # A proposal is judged by the very next commit of the same rows, or not at all.
        if asked is not None and asked.rows is commit.rows:
            emitted = drafts.emitted(commit.cu, commit.next_ids, self._depth)
            found, judged = along(asked.levels, asked.found, emitted)
            self._calibration.note(found, asked.temperature, judged)

    @torch.inference_mode()
    def propose(self, rows: Tensor) -> DraftTree:
        """See `Drafter`."""
        runtime, net = self._runtime, self.net
        roots = runtime.next_token(rows)
        if not self._depth:
            return tree.root(roots)
        temperature = runtime.temperature(rows)
        growth = Growth(roots, self._width, self._depth)
        found: list[Candidates] = []
        batch = runtime.newest(rows, roots, self._features[rows])
        for depth in range(1, self._depth + 1):
            hidden = runtime.forward(net, batch).hidden.view(rows.shape[0], -1, self._size)
            found.append(self._candidates(rows, hidden, temperature, depth))
            level = growth.grow(found[-1])
            if depth < self._depth:
                above = level.parents.unsqueeze(2).expand(-1, -1, self._size)
                features = net.fed_back(hidden.gather(1, above))
                batch = runtime.level(rows, level.tokens, features, level.mask, depth)
        self._asked = _Asked(rows=rows, temperature=temperature, levels=growth.levels, found=found)
        return growth.tree(self._budget, SOURCE)

    @property
    def _size(self) -> int:
        return self.net.config.hidden_size

    def _candidates(
        self, rows: Tensor, hidden: Tensor, temperature: Tensor, depth: int
    ) -> Candidates:
        """Candidates [B, k, C] of the children at `depth` of nodes with outputs [B, k, H]."""
        # Reading this is free on a CPU, where ranking more candidates than needed is not.
        greedy = temperature.is_cpu and not bool((temperature > 0).any())
        nodes = hidden.shape[1]
        vocab = self.net.config.draft_vocab_size
        parts = []
        for part in batches(rows.shape[0], nodes, vocab, rows.device):
            inputs = rows[part], hidden[part], temperature[part]
            parts.append(self._ranked(*inputs, depth, greedy=greedy))
        return Candidates.cat(parts)

    def _ranked(
        self, rows: Tensor, hidden: Tensor, temperature: Tensor, depth: int, *, greedy: bool
    ) -> Candidates:
        """`_candidates` of a few rows; `greedy`: all are known to be."""
        nodes, d2t = hidden.shape[1], self.net.d2t
        owners = rows.repeat_interleave(nodes)
        places = (self._runtime.lens(rows) + depth).repeat_interleave(
            nodes
        )  # of the tokens proposed

        def noise(ids: Tensor) -> Tensor:
            return self._runtime.noise(owners, places, d2t[ids.flatten(1)]).view(ids.shape)

        logits = self.net.logits(hidden.flatten(0, 1)).unsqueeze(1)
        count = max(self._width, _GREEDY if greedy else SAMPLED)
        found = rank(
            logits,
            temperature.repeat_interleave(nodes),
            None if greedy else noise,
            self._calibration.at(depth - 1),
            min(count, logits.shape[-1]),
        )
        by_node = {
            f.name: getattr(found, f.name).view(-1, nodes, *getattr(found, f.name).shape[2:])
            for f in fields(Candidates)
        }
        return Candidates(**{**by_node, "ids": d2t[by_node["ids"]]})
