"""Widening as users do it, for the tiny checkpoints: through the command line, into real folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.cli import main

# Of the tiny checkpoints, 64 wide: 3 copies of the stream, groups that grow, identities between layers.
SIZES: dict[str, int] = {
    "hidden_size": 192,
    "num_layers": 5,
    "num_heads": 12,
    "num_kv_heads": 4,
    "intermediate_size": 250,
}


def widen(source: Path, out: Path, *drafters: Path, **flags: Any) -> Path:
    """Widen a tiny checkpoint and its drafters in float64; returns `out`."""
    asked = {"dtype": "float64", **SIZES, **flags}
    words = [str(w) for k, v in asked.items() for w in (f"--{k.replace('_', '-')}", v)]
    named = [w for folder in drafters or ("none",) for w in ("--drafter", str(folder))]
    assert main(["widen", str(out), "--model", str(source), *named, *words]) == 0
    return out


def facts(out: Path) -> dict[str, Any]:
    """What the folder says of itself."""
    found: dict[str, Any] = json.loads((out / "widened.json").read_text(encoding="utf-8"))
    return found
