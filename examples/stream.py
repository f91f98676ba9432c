"""Stream several answers at the same time with asyncio.

python examples/stream.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from paceline import LLM, SamplingParams


async def answer(llm: LLM, prompt: str) -> str:
    """Read one stream; a chunk may hold several tokens, for a step may accept several."""
    text = ""
    async for chunk in llm.stream(prompt, SamplingParams(max_tokens=24, seed=1)):
        text += chunk.text
        if chunk.result is not None:
            print(f"{prompt!r} ended by {chunk.finish_reason}: {text!r}")
    return text


async def main(model: str = "default") -> None:
    """Decode three prompts together."""
    with LLM(model, max_len=256) as llm:
        await asyncio.gather(*(answer(llm, p) for p in ("Once", "The sea", "In spring")))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
