"""What docs/structured-output.md says of the JSON Schema test suite is what the record says."""

from __future__ import annotations

import json

from tests.records import RESULTS, text


def test_the_suite_s_figures_are_those_of_the_record() -> None:
    """Schemas, answers and instances; no failure; and each keyword that a schema is refused for."""
    record = json.loads((RESULTS / "json-schemas.json").read_text())
    says = text("docs/structured-output.md")
    answers, instances = record["answers"], record["instances"]
    asked, drafted = record["workload"], record["drafted"]
    assert record["failures"] == []
    assert record["accepted"] + record["refused"] == record["cases"]
    assert answers["finished"] + answers["cut"] == answers["made"]
    assert answers["validated"] == answers["finished"]
    assert asked["sha256"] == SUITE, "another file's record"
    assert set(record["judged_by"]) == {"jsonschema", "jsonschema_rs"}
    judged = [f"{record['judged_by'][name]}" for name in ("jsonschema", "jsonschema_rs")]
    for phrase in (
        f"`jsonschema` judged {judged[0]} of them, `jsonschema_rs` {judged[1]}.",
        f"{record['cases']} schemas {record['accepted']} are taken and {record['refused']} are refused",
        f"{asked['samples']} answers of at most {asked['max_tokens']} tokens",
        f"{answers['finished']} of {answers['made']} answers finished, with {answers['distinct']} texts",
        f"{answers['validated']} validated and {answers['unequal']} differed from plain decoding's",
        f"{record['unanswered']} schemas had none that finished",
        f"{drafted['accepted']:,} drafts were accepted, {drafted['forced']:,} of them the grammars' own",
        f"of {instances['invalid']} invalid instances {instances['invalid_allowed']} are texts",
        f"of {instances['valid']} valid ones {instances['valid_allowed']} are",
    ):
        assert phrase in says, phrase
    ranked = sorted(record["refused_for"].items(), key=lambda one: (-one[1], one[0]))
    named = ", ".join(f"{f'`{name}`'} {count}" for name, count in ranked)
    assert f"By keyword: {named}." in says
    formats = ", ".join(f"`{name}`" for name in asked["formats_judged"])
    assert f"The judge knows the formats {formats}." in says


# Of the file with the suite's groups for draft 2020-12, one a line.
SUITE = "772eb18414265d1f769ced8fa69fef889d857327ec88819e9d53de0ad526946c"
