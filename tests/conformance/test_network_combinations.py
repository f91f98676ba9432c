"""Drafter networks with options and circumstances in combination.

`test_networks.py` changes one thing at a time, on Llama. Here, as in `test_combinations.py`, every network
meets every option, at every temperature, with every circumstance at once: too few pages, chunks, prefix
hits and a batch of mixed lengths and options. The full product would take minutes. So the pairs of option
and temperature are dealt out to the architectures, each pair has one prompt, texts are short, and drafters
are trained just long enough for some of what they propose to be accepted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import network_cases
from tests.conformance.test_combinations import ARCHITECTURES, Job, alone, compare
from tests.conformance.test_drafters import OPTIONS, PROMPTS, TEMPERATURES, params
from tests.conformance.test_networks import CASES, IDS
from tests.engine.harness import Outcome

PAIRS = [(option, temperature) for temperature in TEMPERATURES for option in OPTIONS]
TIGHT = {"max_len": 64, "num_pages": 20}  # room for the longest text and little else


def job(prompt: str, option: str, temperature: float) -> Job:
    """A short request."""
    return PROMPTS[prompt], params(option, temperature, max_tokens=14)


@functools.cache
def plain(folder: Path, prompt: str, option: str, temperature: float) -> Outcome:
    """Plain decoding, alone; the same for all networks."""
    return alone(folder, job(prompt, option, temperature))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name, own", CASES, ids=IDS)
def test_every_option_under_every_circumstance(
    checkpoints: Callable[[str], Path],
    drafters: Callable[..., Path],
    name: str,
    own: Mapping[str, Any],
    architecture: str,
) -> None:
    """A fourth of the options and temperatures in one batch, chunks of 5, too few pages, and every
    prompt asked twice.
    """
    target = checkpoints(architecture)
    folder = drafters(network_cases.network_in(name, own), target, steps=30)
    dealt = PAIRS[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES)]
    asked = {
        f"{prompt}/{option}/{temperature}": (prompt, option, temperature)
        for prompt, (option, temperature) in zip(itertools.cycle(PROMPTS), dealt, strict=False)
    }
    seen = compare(
        target,
        {key: job(*each) for key, each in asked.items()},
        {"method": name, "model": str(folder), "chunk_size": 5, **TIGHT, **own},
        group=1,
        plain={key: plain(target, *each) for key, each in asked.items()},
    )
    assert seen["num_preemptions"] > 0, "nobody was preempted: half a test"
    assert seen["hits"] > 0, "no prefix hit: half a test"
    assert seen["spec_decode_num_draft_tokens"] > 0, "nothing was drafted: no test at all"
    assert seen["spec_decode_num_accepted_tokens"] > 0, "nothing was accepted: half a test"
