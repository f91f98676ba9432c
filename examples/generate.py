"""Continue two prompts together and look at what speculation did.

python examples/generate.py [MODEL]     (default: the bundled SmolLM2-135M-Instruct)
"""

from __future__ import annotations

import sys

from paceline import LLM, SamplingParams


def main(model: str = "default") -> None:
    """Print each answer with its accept length."""
    prompts = ["Monday, Tuesday, Wednesday,", "def add(a, b):\n    return a + b\n\ndef sub("]
    params = SamplingParams(max_tokens=32, temperature=0)
    with LLM(model, spec="suffix", max_len=256) as llm:
        for result in llm.generate(prompts, params):
            print(f"{prompts[result.prompt_index]!r} -> {result.text!r}")
            print(
                f"  {len(result.token_ids)} tokens in {result.stats.num_steps} steps, "
                f"accept length {result.accept_length:.2f}, finish {result.finish_reason}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
