"""The head that drafts go through: lighter where it may be, and never the one that decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import models
from paceline.core.config import DraftConfig, EngineConfig
from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams
from paceline.engine.draft_weights import draft_weights, light_head
from paceline.engine.engine import Engine
from paceline.ops.cpu import groups
from paceline.ops.cpu.groups import GroupWeight
from tests import tiny, tiny_drafters
from tests.engine.harness import engine, request, run

needs_groups = pytest.mark.skipif(
    groups.refusal(torch.bfloat16) is not None, reason="no own kernel for 8-bit groups"
)
PROMPT = [7, 8, 9, 7, 8, 9, 7]


def net(folder: Path, dtype: torch.dtype, weights: str = "bf16") -> models.CausalLM:
    files = models.resolve(str(folder))
    return models.load(files, device=torch.device("cpu"), dtype=dtype, weights=weights).net


@needs_groups
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_8_bits(tmp_path: Path, *, tied: bool) -> None:
    """About the target's logits, from fewer bytes; one that is packed is light already."""
    folder = tiny.write_tiny(tmp_path, "llama", tie_word_embeddings=tied)
    target = net(folder, torch.bfloat16)
    head, size = light_head(target, torch.bfloat16)
    hidden = torch.randn(5, target.config.hidden_size, dtype=torch.bfloat16)
    want, found = target.head(hidden), head(hidden)
    assert 0 < (found - want).abs().max() < 0.1 * want.std()
    assert 0 < size < 2 * target.config.vocab_size * target.config.hidden_size
    packed = net(folder, torch.bfloat16, "8bit")
    assert light_head(packed, torch.bfloat16) == (packed.head, 0)


def test_8_bits_where_there_is_no_kernel() -> None:
    """Asked for in float64 or on a GPU: an error that says what is possible; "auto" does without."""
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        place = torch.device(device)
        assert draft_weights("auto", place, dtype) == "bf16"
        with pytest.raises(ConfigError, match="'bf16' is possible everywhere"):
            draft_weights("8bit", place, dtype)


@needs_groups
def test_outputs_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """Whatever the drafts were read off."""
    base = tiny.write_tiny(tmp_path / "target", "llama", seed=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    jobs = [request("a", PROMPT, params)]
    plain = run(engine(base, Engine.build, method="none", dtype="bfloat16"), jobs)
    texts = [PROMPT + plain["a"].tokens]
    folder = tiny_drafters.overfit_dflash(tmp_path / "drafter", base, texts)
    for kept in ("auto", "bf16"):
        spec = DraftConfig(
            method="ddtree",
            model=str(folder),
            weights=kept,
            adaptive=False,
            num_speculative_tokens=8,
        )
        eng = Engine.build(
            EngineConfig(model=str(base), dtype="bfloat16", device="cpu", seed=0, draft=spec)
        )
        block = eng._proposer._drafter._block
        assert (block.net.target.head != eng.loaded.net.head) == (kept == "auto")
        assert isinstance(block.net.fc.weight, GroupWeight) == (kept == "auto")
        assert run(eng, jobs)["a"].tokens == plain["a"].tokens
        assert eng.counters.num_accepted_tokens > 0
