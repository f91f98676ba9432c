"""What docs/structured-output.md says of its cost is what the record says."""

from __future__ import annotations

import json

from tests.records import RESULTS, text

WAYS = {
    "plain decoding": "none",
    "forced tokens alone": "forced alone",
    "with the suffix drafter": "suffix",
}


def test_what_structured_output_costs_is_the_record_s() -> None:
    """Ratios of steps, and each way's seconds and tokens a step; answers were equal to plain decoding's."""
    record = json.loads((RESULTS / "structured-output.json").read_text())
    says = text("docs/structured-output.md")
    assert not record["source"]["dirty"]
    assert record["checks"]["answers_equal_to_plain"] > 0
    none, one, every = record["steps"]
    assert [step["constrained"] for step in (none, one, every)] == [0, 1, every["rows"]]
    assert f"takes {one['ratio']:.2f} times one without" in says
    assert f"with all four {every['ratio']:.2f} times" in says
    for shown, way in WAYS.items():
        told = [
            f"{answers['seconds'][0]:.2f} s, {answers['tokens_a_step']:.2f}"
            for layout in ("flexible", "spaced", "compact")
            for answers in (record["answers"][f"{way}/{layout}"],)
        ]
        assert f"| {shown} | {' | '.join(told)} |" in says
