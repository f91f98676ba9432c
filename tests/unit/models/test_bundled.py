from __future__ import annotations

from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from paceline import models
from paceline.api.tokenizer import Tokenizer
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.request import Request, SamplingParams
from paceline.engine.engine import Engine
from tests.dense import logits
from tests.engine.harness import run
from tests.tiny_gguf import NAMES
from tests.tiny_tokenizers import bundled_file

CPU = torch.device("cpu")
QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a haiku about rain.",
    "What is 12 times 7?",
    "Name three colours.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "Give me a Python function that adds two numbers.",
    "What do cows eat?",
    "List the days of the week.",
    "Why is the sky blue?",
    "Finish: roses are red,",
    "Is a tomato a fruit?",
    "What is the boiling point of water?",
    "Repeat after me: tick tock tick tock.",
    "Suggest a name for a cat.",
    "What comes after Tuesday?",
    "Define 'algorithm'.",
    "Say hello.",
)


@pytest.fixture(scope="module")
def bundled() -> models.LoadedModel:
    """The default model in float32, unpacked."""
    bundled_file()  # skips where the package is missing
    files = models.resolve("default")
    return models.load(files, device=CPU, dtype=torch.float32, weights="bf16")


def in_transformers(transformers: ModuleType, file: Path) -> nn.Module:
    """The file's network in transformers, its weights dequantised by the `gguf` package.

    transformers' own GGUF loader does the same, but wants a package that nothing else here needs.
    """
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=float(np.float32(1e-5)),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    ours = {theirs: name for name, theirs in NAMES.items()}
    state = {}
    for tensor in gguf.GGUFReader(str(file)).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight")
        if part.startswith("blk."):
            _, layer, part = part.split(".", 2)
            stem = f"model.layers.{layer}.{ours[part]}"
        else:
            stem = ours[part]
        if part in ("attn_q", "attn_k"):  # (head, pair, half) -> (head, half, pair)
            pairs = values.reshape(9 if part == "attn_q" else 3, -1, 2, 576)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        state[f"{stem}.weight"] = torch.from_numpy(np.array(values, dtype=np.float32))
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    net = net.to_empty(device="cpu")
    net.model.rotary_emb = type(net.model.rotary_emb)(config)  # its table is no part of the state
    missing = net.load_state_dict(state, strict=False)
    assert missing == (["lm_head.weight"], [])
    net.tie_weights()
    return net.eval()


def test_the_bundled_model_is_what_its_card_says(bundled: models.LoadedModel) -> None:
    """Shape and options of the default model, read from its GGUF header."""
    config = bundled.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_embeddings
    assert config.max_position == 8192
    assert config.rope.theta == 100_000
    assert config.eos_token_ids == (2,)


@pytest.mark.slow
def test_the_bundled_model_answers_as_in_transformers(bundled: models.LoadedModel) -> None:
    """Greedy answers to 20 prompts are token for token those of the same file in transformers, float32:
    the network's by dense attention, and the engine's through pages, batches and drafts.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    file = bundled.files.path
    tokenizer = Tokenizer.from_files(file)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    jobs = [
        Request(
            id=question,
            prompt_ids=tokenizer.encode_chat([{"role": "user", "content": question}]),
            params=params,
            stop_ids=frozenset({2}),
        )
        for question in QUESTIONS
    ]
    config = EngineConfig(
        dtype="float32",
        weights="bf16",
        device="cpu",
        threads=1,
        cache=CacheConfig(max_len=256, max_rows=4),
        draft=DraftConfig(method="suffix", adaptive=False),
    )
    done = run(Engine.build(config, loaded=bundled), jobs)
    theirs = in_transformers(transformers, file)
    for job in jobs:
        answer = done[job.id].tokens
        assert len(answer) == 16 or answer[-1] == 2
        assert 2 not in answer[:-1]
        text = [*job.prompt_ids, *answer]
        with torch.inference_mode():
            expected = theirs(torch.tensor([text])).logits[0]
        found = logits(bundled.net, text)
        # By induction: the argmax after every prefix of an answer is its next token.
        for each in (expected, found):
            assert each[len(job.prompt_ids) - 1 : -1].argmax(-1).tolist() == answer
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    assert "Paris" in tokenizer.decode(done[QUESTIONS[0]].tokens)
