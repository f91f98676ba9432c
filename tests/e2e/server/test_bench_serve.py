"""`paceline bench serve` and `paceline chat --url` against the real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from tests.server_process import ServerProcess

TEXT = "one two three one two three one two three"


def measured(
    server: ServerProcess, prompts: Path, capsys: pytest.CaptureFixture[str], *argv: str
) -> dict:
    words = ["bench", "serve", "--url", server.url, str(prompts), "--max-tokens", "24", *argv]
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"category": "ab"[i % 2], "prompt": f"{TEXT} {i}"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_both_sources_of_acceptance_agree_with_the_server(
    server: ServerProcess, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage, counters and the answers' own metrics tell one story; without drafts nothing counts."""
    record = measured(
        *(server, prompts, capsys, "--endpoint", "completions", "--save-detailed"),
        *("--concurrency", "2", "--repeats", "1", "--variant", "drafts={}"),
        *("--variant", 'plain={"speculative": {"enabled": false}}'),
    )
    drafts, plain = record["results"]
    assert [r["variant"] for r in record["results"]] == ["drafts", "plain"]
    assert (drafts["completed"], plain["completed"]) == (4, 4)
    assert drafts["generated_texts"] == plain["generated_texts"]
    assert drafts["output_lens"] == plain["output_lens"]
    assert drafts["total_output_tokens"] == sum(drafts["output_lens"])
    assert drafts["spec_decode_counters"] == "paceline:"
    assert drafts["spec_decode_num_drafts"] > 0
    assert drafts["spec_decode_contradiction"] is None
    rates = drafts["spec_decode_per_position_acceptance_rates"]
    assert drafts["spec_decode_acceptance_length"] == pytest.approx(1 + sum(rates), abs=1e-4)
    assert "spec_decode_num_drafts" not in plain
    assert plain["answers_acceptance_length"] == 1.0
    assert 1.0 <= drafts["answers_acceptance_length"] <= drafts["spec_decode_acceptance_length"]
    assert record["server"]["version"]
    assert drafts["mean_tpot_ms"] > 0


def test_chat_answers_over_http(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """One message through the server's own template, with how it was drafted."""
    words = ["chat", "--url", server.url, TEXT, "--temperature", "0", "--max-tokens", "16"]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["num_output_tokens"] <= 16
    assert row["num_prompt_tokens"] > 0
    assert row["accept_length"] >= 1.0
    assert main([*words, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == row["text"].rstrip("\n")
    assert "accept length" in err
