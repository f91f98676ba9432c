"""Captures a call in a CUDA graph, for tests on a GPU; no tests here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")


def captured(run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """A graph of a call, and its result, whose memory replays write; waiting in it is an error."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            result = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph, result
