"""docs/widened.md says what the default widening is, and what was measured at a smaller size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.api.widen import plan_widening
from tests.tiny_tokenizers import bundled_file

ROOT = Path(__file__).parents[3]
PAGE = " ".join((ROOT / "docs" / "widened.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The default widening of the bundled model and of the drafters that come with it."""
    bundled_file()
    return dict(plan_widening().record)


def test_sizes_of_the_default_are_those_of_the_page(record: dict[str, Any]) -> None:
    """Sizes, bytes, cache and zeros follow from the code; the page repeats them."""
    new, target = record["new"], record["target"]
    assert f"| layers, width | {new['num_layers']}, {new['hidden_size']} |" in PAGE
    assert f"{new['num_heads']} × 64, {new['num_kv_heads']} × 64" in PAGE
    assert f"| neurons | {new['intermediate_size']} |" in PAGE
    assert f"| parameters | {target['parameters'] / 1e9:.2f} B |" in PAGE
    assert f"| {target['read_bytes_per_step'] / 1e9:.2f} GB | 15.14 GB |" in PAGE
    assert f"| {target['kv_bytes_per_token']:,} bytes | 147,456 bytes |" in PAGE
    assert f"{target['zeros_share_of_read']:.1%}".replace("%", " % of what a step reads") in PAGE
    assert f"{target['bytes'] / 1e9:.1f} GB" in PAGE
    identities = ", ".join(map(str, record["identity_layers"]))
    assert f"({identities})" in PAGE


def test_sizes_of_the_drafters_are_those_of_the_page(record: dict[str, Any]) -> None:
    """They are the shipped ones, and hold no zeros."""
    dflash, eagle3 = (record["drafters"][f"smollm2-135m-{name}"] for name in ("dflash", "eagle3"))
    assert f"DFlash, {dflash['parameters'] / 1e9:.2f} B" in PAGE
    assert f"EAGLE-3, {eagle3['parameters'] / 1e9:.2f} B" in PAGE
    assert f"drafters' {(dflash['bytes'] + eagle3['bytes']) / 1e9:.1f} GB" in PAGE
    assert dflash["zeros_share_of_read"] == eagle3["zeros_share_of_read"] == 0


def test_what_the_page_says_of_the_record_is_in_it() -> None:
    """Equal answers and accept lengths, at the size that two cores can run."""
    path = ROOT / "benchmarks" / "results" / "widened-mid.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["drafter"]: row for row in found["rows"]}
    assert set(rows) == {"none", "ddtree", "eagle3"}
    for row in rows.values():
        assert row["equal"] == row["accept_lengths_equal"] == row["answers"] == 6
        assert row["accept_length_small"] == row["accept_length_wide"]
        assert f"{row['tokens']} tokens" in PAGE
    assert f"{rows['ddtree']['accept_length_wide']} on average with `ddtree`" in PAGE
    assert f"{rows['eagle3']['accept_length_wide']} with `eagle3`" in PAGE
    new = found["widened"]["new"]
    assert f"{new['hidden_size']} wide, {new['num_layers']} layers" in PAGE
    assert f"{found['widened']['target']['parameters'] / 1e9:.2f} B parameters, float32" in PAGE
