"""DFlash in the engine, layout by layout: what its blocks see and compute is the definition's.

A random drafter is enough: its proposals are nonsense, but its keys, hidden states and candidates can
be compared with a dense pass over the whole text, written from the mask table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.request import Request, SamplingParams
from paceline.core.tree import DraftTree
from paceline.draft.dflash import DFlashBlock
from paceline.engine.engine import Engine
from paceline.engine.plan import StepPlan
from tests import tiny, tiny_drafters
from tests.engine.harness import Outcome, engine, request, run

PROMPTS = [
    [11, 12, 13, 14, 15] * 4,
    [31, 7, tiny_drafters.MASK, 7, 9, 31, tiny_drafters.MASK],  # the mask's id as real text
    [5],
    [(3 * i) % 23 + 3 for i in range(33)],
]
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": SLIDING,
    "sliding, not causal": SLIDING | {"is_causal": False},
    "sliding and full": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
    },
    "anchor": {"dflash_config": {"sample_from_anchor": True}},
    "more taps than layers, the last among them": {
        "dflash_config": {"target_layer_ids": [1, 0, 1]}
    },
    "one layer, one tap": {"num_hidden_layers": 1, "dflash_config": {"target_layer_ids": [1]}},
    "block of two": {"block_size": 2},
    "block of seventy": {"block_size": 70},
    "yarn, short positions": {
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    },
    "scales": {
        "dflash_config": {
            "output_multiplier": 0.3,
            "final_logit_softcapping": 2.0,
            "input_embedding_scale": 1.7,
        }
    },
    "biases": {"attention_bias": True},
    "the second": tiny_drafters.DFLASH2,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=3)


Round = tuple[Sequence[Request], dict[str, Outcome]]


@pytest.fixture(scope="module")
def rounds(model: Path) -> list[Round]:
    """Batches that every layout serves one after the other, and their autoregressive answers."""
    plain = engine(model, method="none")
    made: list[Round] = []
    for repeat in range(2):
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                max_tokens=18, ignore_eos=True, temperature=temperature, seed=repeat
            )
            jobs = [
                request(f"{i}/{repeat}/{temperature}", p, params) for i, p in enumerate(PROMPTS)
            ]
            made.append((jobs, run(plain, jobs)))
    return made


class Definition:
    """Compares every block pass of an engine with the dense one, when the host knows the texts."""

    def __init__(self, eng: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._eng = eng
        self.block: DFlashBlock = eng._proposer._drafter._block
        self.compared = 0
        real = self.block._hidden

        def spy(rows: Tensor, roots: Tensor) -> Tensor:
            hidden = real(rows, roots)
            for row, mine in zip(rows.tolist(), hidden, strict=True):
                if self.has_room(row):
                    torch.testing.assert_close(mine, self.expected(row), rtol=1e-8, atol=1e-8)
                    self.compared += 1
            return hidden

        monkeypatch.setattr(self.block, "_hidden", spy)
        plan_block = eng._scheduler._plan_block

        def planned(*args: object) -> StepPlan | None:
            plan: StepPlan | None = plan_block(*args)
            for sequence, budget in zip(plan.sequences, plan.budgets, strict=True) if plan else ():
                assert budget == 0 or self.has_room(sequence.row), "drafts without room for keys"
            return plan

        monkeypatch.setattr(eng._scheduler, "_plan_block", planned)

    def has_room(self, row: int) -> bool:
        """Whether the block's keys have pages; a row without them must have no budget."""
        (sequence,) = (s for s in self._eng._scheduler.running if s.row == row)
        return (
            4 * len(sequence.pages) >= len(sequence.tokens) - 1 + self.block.net.config.block_size
        )

    def expected(self, row: int) -> Tensor:
        """Hidden states [P, H] of the row's next block, from a fresh pass over its tokens."""
        (sequence,) = (s for s in self._eng._scheduler.running if s.row == row)
        net, tokens = self.block.net, sequence.tokens
        known = len(tokens) - 1
        features = tiny_drafters.features_of(
            self._eng._launcher._target.net, tokens[:known], net.config.target_layer_ids
        )
        first = 0 if net.config.sample_from_anchor else 1
        hidden = tiny_drafters.blocks(net, tokens, [known], features)[0]
        return hidden[first : first + self.block.num_positions]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(
    model: Path,
    rounds: Sequence[Round],
    tmp_path: Path,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block passes over the paged cache equal the dense definition, in a batch of mixed lengths, with
    chunks, prefix hits and preemption; tokens equal autoregressive ones.
    """
    folder = tiny_drafters.write_dflash(tmp_path, model, **LAYOUTS[layout])
    wide = {"num_pages": 60} if "seventy" in layout else {"num_pages": 26}
    size = {"max_len": 72, "chunk_size": 7, **wide}
    eng = engine(model, method="dflash", model=str(folder), num_speculative_tokens=80, **size)
    watch = Definition(eng, monkeypatch)
    block = watch.block.net.config.block_size
    assert watch.block.num_positions == (block if layout == "anchor" else block - 1)
    for jobs, expected in rounds:
        for name, outcome in run(eng, jobs).items():
            assert outcome.tokens == expected[name].tokens, name
    assert watch.compared > 100


@pytest.mark.parametrize("anchor", [False, True])
def test_each_layout_accepts_in_its_own(model: Path, tmp_path: Path, anchor: bool) -> None:
    """A drafter trained in one layout accepts in it, and little when its configuration says the
    other: the two differ by one position, and nothing crashes.
    """
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=1)
    jobs = [request(str(i), p, params) for i, p in enumerate(PROMPTS)]
    plain = run(engine(model, method="none"), jobs)
    texts = [p + plain[str(i)].tokens for i, p in enumerate(PROMPTS)]
    folder = tiny_drafters.overfit_dflash(
        tmp_path / "right", model, texts, steps=100, dflash_config={"sample_from_anchor": anchor}
    )
    accepted = []
    for said in (anchor, not anchor):
        config = (folder / "config.json").read_text(encoding="utf-8")
        values = tiny_drafters.json.loads(config)
        values["dflash_config"]["sample_from_anchor"] = said
        (folder / "config.json").write_text(tiny_drafters.json.dumps(values), encoding="utf-8")
        eng = engine(model, method="dflash", model=str(folder))
        for name, outcome in run(eng, jobs).items():
            assert outcome.tokens == plain[name].tokens
        accepted.append(eng.report()["spec_decode_num_accepted_tokens"])
    assert accepted[0] > 1.3 * accepted[1]  # shared noise alone guesses many at temperature 1


def test_the_mask_s_id_is_a_token_like_others(model: Path, tmp_path: Path) -> None:
    """The mask token's id in prompts and answers is neither dropped nor taken for a mask."""
    folder = tiny_drafters.write_dflash(tmp_path, model)
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=0.0, logit_bias={tiny_drafters.MASK: 5.0}
    )
    jobs = [request(str(i), p, params) for i, p in enumerate(PROMPTS)]
    plain = run(engine(model, method="none"), jobs)
    done = run(engine(model, method="dflash", model=str(folder)), jobs)
    assert sum(outcome.tokens.count(tiny_drafters.MASK) for outcome in done.values()) > 5
    assert {n: o.tokens for n, o in done.items()} == {n: o.tokens for n, o in plain.items()}


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_trees_are_well_formed(
    model: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each proposal keeps every invariant of a DraftTree, starts at the newest token, and has the
    best candidates of its positions; the block's length and the limit both bound a chain.
    """
    folder = tiny_drafters.write_dflash(tmp_path, model, block_size=6)
    trees: list[DraftTree] = []
    for limit in (3, 5, 12):
        eng = engine(model, method=method, model=str(folder), num_speculative_tokens=limit)
        drafter = eng._proposer._drafter

        def spy(
            rows: Tensor,
            eng: Engine = eng,
            drafter: Any = drafter,
            real: Any = drafter.propose,
            limit: int = limit,
        ) -> DraftTree:
            tree: DraftTree = real(rows)
            tree.check()
            assert torch.equal(tree.token_ids[:, 0], eng._rows.next_token[rows])
            nodes = limit if method == "ddtree" else min(limit, 5)
            assert tree.token_ids.shape[1] == 1 + nodes == drafter.spec.max_nodes
            assert int(tree.depths.max()) <= min(limit, 5) == drafter.spec.max_depth
            trees.append(tree)
            return tree

        monkeypatch.setattr(drafter, "propose", spy)
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8)
        run(eng, [request(str(i), p, params) for i, p in enumerate(PROMPTS)])
    assert len(trees) > 10
    assert {int(s) for s in trees[0].sources.flatten()} == {0, 4}


def test_no_room_for_drafts(model: Path, tmp_path: Path) -> None:
    """A limit of 0 nodes decodes plainly; the drafter still observes, and is never asked."""
    folder = tiny_drafters.write_dflash(tmp_path, model)
    eng = engine(model, method="dflash", model=str(folder), num_speculative_tokens=0)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    jobs = [request("a", PROMPTS[0], params)]
    assert run(eng, jobs)["a"].tokens == run(engine(model, method="none"), jobs)["a"].tokens
    assert eng.report()["spec_decode_num_drafts"] == 0
    assert eng._proposer._drafter.propose(torch.tensor([0, 1])).num_nodes.tolist() == [1, 1]


def test_what_was_emitted_is_learned_from(model: Path, tmp_path: Path) -> None:
    """Survival estimates learn in the engine: from greedy rows for greedy ones, sampled for sampled."""
    folder = tiny_drafters.write_dflash(tmp_path, model)
    for kind, temperature in enumerate((0.0, 1.0)):
        eng = engine(model, method="dflash", model=str(folder))
        calibration = eng._proposer._drafter._block._calibration
        before = calibration._log.clone()
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature)
        run(eng, [request(str(i), p, params) for i, p in enumerate(PROMPTS)])
        changed = (calibration._log != before).view(2, -1).any(1).tolist()
        assert changed == [kind == 0, kind == 1]
