"""Log-probabilities of prompts' tokens on a CUDA device: the CPU's, whatever is in flight beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from tests import tiny
from tests.engine.harness import engine, request, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = {"long": [(7 * i * i + 3 * i) % 90 + 3 for i in range(180)], "loop": [11, 12, 13] * 9}


@pytest.mark.parametrize("chunk_size", [7, 512])
@pytest.mark.parametrize("method", ["none", "suffix"])
def test_the_values_of_the_cpu(tmp_path: Path, method: str, chunk_size: int) -> None:
    """Copied to the host beside the first token, or with a pass that picks none."""
    model = tiny.write_tiny(tmp_path / "model", "qwen3", seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asked = [request(n, p, params, prompt_logprobs=3) for n, p in PROMPTS.items()]
    free = [request(f"free{i}", [i + 3, 5, 7], params) for i in range(2)]
    sizes = {"max_len": 220, "chunk_size": chunk_size, "method": method}
    truth = run(engine(model, **sizes), asked)
    done = run(engine(model, Engine.build, device="cuda", **sizes), [*free, *asked])
    for name in PROMPTS:
        told = done[name].outputs[0].prompt_logprobs
        expected = truth[name].outputs[0].prompt_logprobs
        assert told is not None
        assert expected is not None
        assert told[0] is expected[0] is None
        for one, other in zip(told[1:], expected[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
            assert list(one.top_logprobs) == pytest.approx(list(other.top_logprobs), abs=1e-6)
            assert list(one.top_ids) == list(other.top_ids)
