"""A conversation of two turns through the model's chat template.

python examples/chat.py [MODEL]
"""

from __future__ import annotations

import sys

from paceline import LLM, SamplingParams


def main(model: str = "default") -> None:
    """Ask, answer, ask again."""
    params = SamplingParams(max_tokens=32, temperature=0)
    messages: list[dict[str, str]] = []
    with LLM(model, max_len=256) as llm:
        for question in ("Name a fruit.", "Now name a vegetable."):
            messages.append({"role": "user", "content": question})
            (result,) = llm.chat(messages, params)
            messages.append({"role": "assistant", "content": result.text})
            print(f"> {question}\n{result.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
