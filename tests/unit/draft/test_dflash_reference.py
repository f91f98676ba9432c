"""Equal to the published reference, PyPI's dflash 0.1.0, on tiny random targets and drafters.

The reference runs on transformers' models, reads the same two folders, and is used here as an oracle
only. What is compared: tapped features, context keys and values, every row of the block, and the
committed tokens of whole greedy runs, after partial accepts of every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.draft.candidates import Calibration, rank
from paceline.draft.dflash_checkpoint import load
from paceline.draft.dflash_net import DFlashNet
from tests import tiny, tiny_drafters
from tests.engine.harness import engine, request, run

transformers = pytest.importorskip("transformers")
reference = pytest.importorskip(
    "dflash.model", reason="needs the reference: pip install --no-deps dflash==0.1.0"
)

# The reference is written for an older transformers, which takes its word `past_key_values` still.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

# What a checkpoint may ask for, as far as the reference knows it.
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "one layer": {"num_hidden_layers": 1, "dflash_config": {"target_layer_ids": None}},
    "more taps than layers": {"dflash_config": {"target_layer_ids": [0, 1, 2]}},
    "fewer taps than layers": {"num_hidden_layers": 3, "dflash_config": {"target_layer_ids": [2]}},
    "block in dflash_config": {"block_size": None, "dflash_config": {"block_size": 6}},
    "one sliding layer": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "use_sliding_window": True,
    },
    "sliding, not causal": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 9,
        "use_sliding_window": True,
        "is_causal": False,
    },
    "all causal": {"is_causal": True},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
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
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # transformers norms in float32, whatever the model's dtype
TOKENS = [(5 * i * i + 2 * i) % 90 + 3 for i in range(40)]


@dataclass
class Pair:
    """The reference's target and drafter, and ours, from the same files, in float64."""

    their_target: Any
    their_drafter: Any
    target: Any
    drafter: DFlashNet
    folders: tuple[Path, Path]


@pytest.fixture(params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """One layout after the other."""
    options = with_taps(LAYOUTS[request.param])
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5, num_hidden_layers=4)
    folder = tiny_drafters.write_dflash(tmp_path / "drafter", base, seed=2, **options)
    return load_pair(base, folder)


def with_taps(layout: dict[str, Any]) -> dict[str, Any]:
    """Not the last layer: transformers hands out its output after the final norm."""
    nested = {"target_layer_ids": [0, 2], **layout.get("dflash_config", {})}
    return {**layout, "dflash_config": nested}


def load_pair(base: Path, folder: Path) -> Pair:
    model, info = tiny_drafters.target_of(base)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    config = (folder / "config.json").read_text(encoding="utf-8")
    second = "DFlash2DraftModel" in config
    kind = reference.DFlash2DraftModel if second else reference.DFlashDraftModel
    drafter = kind.from_pretrained(folder, dtype=torch.float64)
    return Pair(theirs.eval(), drafter.eval(), model, load(folder, info), (base, folder))


def their_features(pair: Pair, tokens: list[int]) -> Tensor:
    out = pair.their_target(torch.tensor([tokens]), output_hidden_states=True)
    return reference.extract_context_feature(
        out.hidden_states, pair.their_drafter.target_layer_ids
    )[0]


def their_block(pair: Pair, features: Tensor, root: int, cache: Any, done: int) -> Tensor:
    """The reference's block pass: all rows [b, H]; the cache is cropped to the context again."""
    drafter, start = pair.their_drafter, len(features)
    ids = torch.tensor([[root] + [drafter.mask_token_id] * (drafter.block_size - 1)])
    scale = float(reference._draft_value(drafter.config, "input_embedding_scale", 1.0))
    hidden = drafter(
        target_hidden=features[None, done:],
        noise_embedding=reference._raw_input_embeddings(pair.their_target, ids, scale),
        position_ids=torch.arange(done, start + drafter.block_size)[None],
        past_key_values=cache,
        use_cache=True,
    )
    reference._crop_to(cache, start)
    return hidden[0]


@torch.inference_mode()
def test_features_keys_and_every_row(pair: Pair) -> None:
    """Taps, context keys and values, hidden states and logits of every block row, at several
    positions, each after a partial accept of another length.
    """
    net, taps = pair.drafter, pair.drafter.config.target_layer_ids
    assert list(taps) == list(pair.their_drafter.target_layer_ids)
    cache = reference._make_cache(pair.their_drafter.config)
    done = 0
    for start in (1, 2, 5, 12, 13, 17, 30):
        features = tiny_drafters.features_of(pair.target, TOKENS[:start], taps)
        theirs = their_features(pair, TOKENS[:start])
        torch.testing.assert_close(features, theirs, **CLOSE)
        hidden = their_block(pair, theirs, TOKENS[start], cache, done)
        done = start
        mine = tiny_drafters.blocks(net, TOKENS, [start], features)[0]
        torch.testing.assert_close(mine, hidden, **CLOSE)
        logits = pair.their_drafter.compute_logits(
            hidden, reference._output_head(pair.their_target)
        )
        torch.testing.assert_close(net.logits(mine), logits, **CLOSE)
        for layer, (k, v) in enumerate(net.context(features, torch.arange(start))):
            stored = cache.layers[layer]
            kept = stored.keys.shape[2]  # a sliding layer keeps its window only
            torch.testing.assert_close(k[-kept:].transpose(0, 1), stored.keys[0], **CLOSE)
            torch.testing.assert_close(v[-kept:].transpose(0, 1), stored.values[0], **CLOSE)


@torch.inference_mode()
def test_the_second_s_choice_of_candidates(tmp_path: Path) -> None:
    """DFlash 2's walk over candidates, each position knowing the choice before it, is the reference's
    for every newest token; it is not the walk of logits alone.
    """
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5, num_hidden_layers=4)
    folder = tiny_drafters.write_dflash(
        tmp_path / "drafter", base, **with_taps(tiny_drafters.DFLASH2)
    )
    pair = load_pair(base, folder)
    net = pair.drafter
    assert net.selector is not None
    features = tiny_drafters.features_of(pair.target, TOKENS[:9], net.config.target_layer_ids)
    changed = 0
    for root in range(0, 96, 5):
        hidden = tiny_drafters.blocks(net, [*TOKENS[:9], root], [9], features)[:, 1:]
        anchor = torch.tensor([root])
        theirs, _, _ = pair.their_drafter.propose(
            hidden, anchor, reference._output_head(pair.their_target), 0.0
        )
        projected = net.selector.projected(hidden)

        def gains(
            position: int,
            before: Tensor | None,
            ids: Tensor,
            projected: Tensor = projected,
            anchor: Tensor = anchor,
        ) -> Tensor:
            before = anchor if before is None else before
            return net.selector.gains(projected[:, position], before, ids)

        logits = net.logits(hidden[0])[None]
        new = Calibration(logits.shape[1], torch.device("cpu"))
        mine = rank(logits, torch.zeros(1), None, new, 6, gains)
        assert mine.ids[:, :, 0].tolist() == theirs.tolist()
        changed += mine.ids[:, :, 0].tolist() != logits.argmax(-1).tolist()
    assert changed > 5


def test_committed_tokens(pair: Pair) -> None:
    """A greedy run commits the reference's tokens, in steps of the reference's lengths."""
    check_committed(pair, TOKENS[:9], 24)


def test_a_trained_drafter_as_it_is_saved(tmp_path: Path) -> None:
    """The same with a drafter that we trained and saved: the reference reads our files, and accepts
    chains of every length where we do.
    """
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5, num_hidden_layers=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = run(engine(base, method="none"), [request("a", TOKENS[:9], params)])["a"].tokens
    folder = tmp_path / "drafter"
    nested = {"target_layer_ids": [0, 2]}
    tiny_drafters.overfit_dflash(folder, base, [TOKENS[:9] + plain], steps=26, dflash_config=nested)
    lengths = check_committed(load_pair(base, folder), TOKENS[:9], 40)
    assert len(set(lengths)) >= 3, "not every kind of accept was seen"


def check_committed(pair: Pair, prompt: list[int], length: int) -> list[int]:
    """Compare whole runs; returns the tokens of each step."""
    target, folder = pair.folders
    block = pair.their_drafter.block_size
    theirs = reference_run(pair, prompt, length)
    eng = engine(target, method="dflash", model=str(folder), num_speculative_tokens=block - 1)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    outcome = run(eng, [request("a", prompt, params)])["a"]
    assert outcome.tokens == theirs["tokens"]
    lengths = [len(out.token_ids) for out in outcome.outputs][1:]  # after the prefill's token
    assert lengths == theirs["lengths"]
    return lengths


def reference_run(pair: Pair, prompt: list[int], length: int) -> dict[str, list[int]]:
    """The reference's own loop. It times itself on a GPU, so statistics are asked for without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_cuda_time", lambda: 0.0)
        out = reference.dflash_generate(
            pair.their_drafter,
            target=pair.their_target,
            input_ids=torch.tensor([prompt]),
            max_new_tokens=length,
            stop_token_ids=None,
            return_stats=True,
        )
    return {
        "tokens": out.output_ids[0, len(prompt) :].tolist(),
        "lengths": list(out.acceptance_lengths),
    }
