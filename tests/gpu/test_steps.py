"""`paceline bench steps` on a CUDA device: whole steps are graphs, with the synthetic walk in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.bench.step_cases import Case, parse_spec
from paceline.bench.steps import Bench, Settings, run
from paceline.core.config import CacheConfig, EngineConfig
from paceline.cost.hardware import H200, measure, preset
from tests import tiny, tiny_drafters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
CASES = [
    Case(sequences=1, context=40),
    Case(sequences=3, context=40),
    Case(sequences=5, context=70),
]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations with heads of 64, as kernels want them, and no weights."""
    base = tmp_path_factory.mktemp("shapes")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    whole = tiny.write_tiny(base / "whole", "qwen3", max_position_embeddings=1024, **sizes)
    config = json.loads((whole / "config.json").read_text())
    drafter = tiny_drafters.dflash_config(config, head_dim=64)
    for name, values in (("target", config), ("drafter", drafter)):
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(values))
    return base


@pytest.mark.parametrize("rates,mean", [(None, None), ((0.9, 0.4, 0.2), 2.5)])
@pytest.mark.parametrize("form", ["none", "dflash:{}", "ddtree:{}:9", "chain:4", "uneven:4:9"])
def test_every_counted_step_replays_a_graph(
    shapes: Path, form: str, rates: tuple[float, ...] | None, mean: float | None
) -> None:
    """And none is captured among them; accepted is what was said; parts are measured beside it."""
    config = EngineConfig(
        model=str(shapes / "target"),
        device="cuda",
        dtype="bfloat16",
        cache=CacheConfig(page_size=16, chunk_size=256),
    )
    bench = Bench(config, random_weights=0)
    settings = Settings(steps=24, repeats=2, warmup=2, stage_steps=4, rates=rates)
    spec = parse_spec(form.format(shapes / "drafter"))
    for measured in run(bench, spec, CASES, settings):
        assert measured.without_graph == 0
        assert measured.captured == 0
        assert {"propose", "select", "verify", "walk", "commit"} <= set(measured.stages)
        if mean is not None and spec.method in {"dflash", "chain"}:
            assert measured.accept_length == pytest.approx(mean, abs=0.15)


def test_ceilings_are_plausible() -> None:
    """A gigabyte's reading and a large product; an H200's are those that are kept for it."""
    found = measure(CUDA, torch.bfloat16, scale=0.25)
    assert 1e11 < found.read_bandwidth < 2e13
    assert 1e13 < found.matmul_rate < 5e15
    assert found.launch is not None
    assert 1e-7 < found.launch < 1e-4
    factors = [factor for _, factor in found.read_rise]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    if preset(CUDA) is H200:
        assert found.read_bandwidth == pytest.approx(H200.read_bandwidth, rel=0.2)
