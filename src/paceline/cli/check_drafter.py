"""`paceline check drafter`: does a drafter network belong to this target, and is it read rightly?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.console import notes
from paceline.cli.flags import with_flags
from paceline.cli.workbench import AsJson
from paceline.core.config import EngineConfig
from paceline.core.errors import ConfigError, ModelError, PacelineError

if TYPE_CHECKING:
    from paceline.api.tokenizer import Tokenizer
    from paceline.core.config import DraftConfig
    from paceline.draft.selftest import Report

EXAMPLES = (
    "paceline check drafter",
    "paceline check drafter --spec eagle3 --spec-model FOLDER --model TARGET",
)


@with_flags
def drafter(
    *,
    config: EngineConfig,
    max_tokens: Annotated[int, Parameter(help="tokens of each answer, at most")] = 96,
    out: Annotated[Path | None, Parameter(help="write the record to this file too")] = None,
    as_json: AsJson = False,
) -> int:
    """Test a drafter network on what the target itself says; exit code 1 where it does not fit.

    The target answers a few built-in prompts greedily, and the drafter drafts from every place of the
    answers, as configured and in every other way that its files could be meant: taps one layer off, the
    other layout, mask and norms. One JSON record is the last line of stdout; a terminal shows it with
    --json only.
    """
    if max_tokens < 2:
        msg = f"--max-tokens {max_tokens} leaves nothing to draft; give 2 or more"
        raise ConfigError(msg)
    from paceline.api.probes import TEXTS, probes_of
    from paceline.bench import drafter_check as check
    from paceline.cli.workbench import Workbench, command_line, publish, stop_ids, tokenizer
    from paceline.core.config import DraftConfig
    from paceline.draft import folder_problems
    from paceline.draft.base import TargetInfo
    from paceline.draft.selftest import SUBJECTS, examine
    from paceline.engine.choice import choose_drafter
    from paceline.engine.fitness import answers

    for useless in folder_problems(config.draft):
        raise ConfigError(useless)
    tokens = tokenizer(config)
    alone = replace(config, draft=DraftConfig(method="none", num_speculative_tokens=0))
    with Workbench().engine(alone) as engine:
        draft, _ = choose_drafter(config.draft, engine.loaded.files)
        draft = _network(draft)
        net = engine.loaded.net
        info = TargetInfo(
            config=engine.model_config,
            device=net.device,
            dtype=net.dtype,
            embed=net.embed,
            head=net.head,
        )
        report, problem = None, None
        try:
            subject = SUBJECTS.get(draft.method)(draft, info)
        except (ConfigError, ModelError) as error:
            problem = str(error)
        else:
            probes = replace(probes_of(tokens), stop_ids=stop_ids(tokens, engine))
            texts = answers(engine, probes, max_tokens)
            if not texts:
                msg = (
                    "the target answered no built-in prompt with two tokens or more, so nothing can "
                    "be drafted; raise --max-len, or check the model"
                )
                raise ConfigError(msg)
            report = examine(subject, net, texts, net.device)
        resolved = engine.config
    other = _other_tokenizer(draft, tokens, TEXTS)
    _show(draft, report, problem, other)
    shown = check.record(report, problem, draft, resolved, tokenizer=other, command=command_line())
    publish(shown, out, as_json=as_json)
    return 0 if shown["fits"] else 1


def _network(config: DraftConfig) -> DraftConfig:
    """The network that a config names, alone or as a part of a merged drafter.

    Raises:
        ConfigError: it names none.
    """
    from paceline.draft import NETWORKS, check_name, network_of

    check_name(config.method)
    network = network_of(config)
    if network is not None:
        return network
    msg = (
        f"drafter {config.method!r} is no network: it is made for no target in particular, so there is "
        f"nothing to check. Networks are {', '.join(NETWORKS)}; name one with --spec and its folder "
        "with --spec-model."
    )
    raise ConfigError(msg)


def _other_tokenizer(draft: DraftConfig, tokens: Tokenizer, texts: Sequence[str]) -> str | None:
    """How the tokenizer in a drafter's folder differs from the target's, if there is one and it does."""
    from paceline.api.tokenizer import Tokenizer

    folder = Path(draft.model or "").expanduser()
    if draft.model is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        its = Tokenizer.from_files(folder)
    except PacelineError as error:
        return f"the tokenizer in {folder} cannot be read ({error})"
    differing = sum(its.encode(text) != tokens.encode(text) for text in texts)
    if not differing:
        return None
    return (
        f"the tokenizer in {folder} reads {differing} of {len(texts)} texts otherwise than the "
        "target's: the drafter was made for another target"
    )


def _show(
    draft: DraftConfig, report: Report | None, problem: str | None, other: str | None
) -> None:
    from paceline.bench.drafter_check import table

    console = notes()
    console.print(f"{draft.method} in {draft.model}", markup=False)
    if report is None:
        console.print(f"refused: {problem}", markup=False)
    else:
        console.print(table(report))
        for finding in report.findings:
            console.print(f"{finding.level}: {finding.text}", markup=False)
        if report.vocabulary is not None:
            console.print(f"vocabulary map: {report.vocabulary.describe()}", markup=False)
        console.print(f"{report.outcome}: {report.advice}", markup=False)
    if other is not None:
        console.print(f"another tokenizer: {other}", markup=False)
