"""Peers on the same machine, cores and prompts: transformers and llama.cpp, greedy, one sequence.

Each peer is a function from prompt ids to the ids that it emitted; whoever measures takes turns with
ours, prompt by prompt, so that the machine's drift hits all alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paceline import models
from paceline.models import LoadedModel
from paceline.models.weights import save

Answer = Callable[[Sequence[int], int], Sequence[int]]  # prompt ids, new tokens -> emitted ids


def hugging_face_folder(loaded: LoadedModel, folder: Path) -> Path:
    """Write a loaded Llama (bf16 weights) as a folder that transformers reads."""
    config = loaded.config
    save(loaded.net, folder / "model.safetensors")
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(text))
    return folder


def transformers_answer(dtype: torch.dtype) -> Answer:
    """`generate` of transformers on the default model's weights, dequantised."""
    from transformers import AutoModelForCausalLM

    loaded = models.load(
        models.resolve("default"), device=torch.device("cpu"), dtype=dtype, weights="bf16"
    )
    with tempfile.TemporaryDirectory() as folder:
        hugging_face_folder(loaded, Path(folder))
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def answer(prompt: Sequence[int], count: int) -> Sequence[int]:
        ids = torch.tensor([list(prompt)])
        out = net.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    return answer


_TRY = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
next(model.generate([1, 2, 3], temp=0.0))
"""


def llama_cpp_answer(threads: int, context: int = 2048) -> Answer:
    """llama.cpp, through llama-cpp-python, on the default model's own file.

    Raises:
        ImportError: it is not installed, or its build does not run on this processor; tried in a
            process of its own, which an illegal instruction would end.
    """
    from llama_cpp import Llama

    path = models.resolve("default").path
    tried = subprocess.run(
        [sys.executable, "-c", _TRY, str(path)], capture_output=True, check=False, timeout=300
    )
    if tried.returncode != 0:
        why = tried.stderr.decode(errors="replace").strip().splitlines()[-1:]
        msg = f"llama.cpp ends with status {tried.returncode} here {' '.join(why)}"
        raise ImportError(msg)
    model = Llama(
        str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def answer(prompt: Sequence[int], count: int) -> Sequence[int]:
        model.reset()
        out = []
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            out.append(token)
            if len(out) == count:
                return out
        return out

    return answer
