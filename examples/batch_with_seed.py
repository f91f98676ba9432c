"""Seeds: samples of one seed differ, each can be repeated, and drafting changes none of them.

python examples/batch_with_seed.py [MODEL]
"""

from __future__ import annotations

import sys
from dataclasses import replace

from paceline import LLM, SamplingParams


def main(model: str = "default") -> None:
    """Take four samples, repeat them, and repeat them without speculation."""
    params = SamplingParams(n=4, max_tokens=16, temperature=1.0)
    with LLM(model, max_len=256) as llm:
        first = llm.generate("The best thing about", params)
        for result in first:
            print(f"{result.sample_index}: {result.text!r}")
        seed = first[0].seed
        again = llm.generate("The best thing about", replace(params, seed=seed))
        plain = llm.generate(
            "The best thing about", replace(params, seed=seed, num_speculative_tokens=0)
        )
    tokens = [r.token_ids for r in first]
    print(f"seed {seed}; repeated: {tokens == [r.token_ids for r in again]}")
    print(f"without drafts the same: {tokens == [r.token_ids for r in plain]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
