"""The command line over fakes: no model is loaded."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from paceline.api import llm as llm_module
from paceline.api.llm import LLM
from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import TokenizerParts
from paceline.cli import main
from paceline.core.config import EngineConfig
from paceline.engine.engine import Engine
from tests import tiny
from tests.fake_engine import EOS, FakeEngine

TOKENIZER = Tokenizer(
    TokenizerParts(
        backend=tiny.tiny_tokenizer(),
        named_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=(EOS,),
        chat_templates={"default": tiny.CHAT_TEMPLATE},
    )
)


@dataclass
class Ran:
    """What a run of the program left."""

    code: int
    out: str
    err: str
    engines: list[FakeEngine]
    configs: list[EngineConfig]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `paceline ARGS` in this process over a fake engine that answers with `script`."""

    def start(
        *argv: str,
        script: Sequence[int] | Callable = (),
        stdin: str | None = None,
        terminal: bool = False,
        **options,
    ) -> Ran:
        answer = script or [*TOKENIZER.encode("the answer"), EOS]
        engines: list[FakeEngine] = []
        configs: list[EngineConfig] = []

        def build(config: EngineConfig, **_: object) -> FakeEngine:
            engine = FakeEngine(answer, **options)
            engine.loaded = None
            engine.config = engine_config = _resolved(config)
            engines.append(engine)
            configs.append(engine_config)
            return engine

        def open_llm(config: EngineConfig, progress: Callable[[int, int], None]) -> LLM:
            progress(1, 2)
            progress(2, 2)
            return LLM.from_engine(build(config), TOKENIZER)

        source = io.StringIO(stdin or "")
        source.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", source)
        monkeypatch.setattr(llm_module, "LLM", open_llm)
        monkeypatch.setattr(Engine, "build", staticmethod(build))
        monkeypatch.setattr("paceline.cli.workbench.tokenizer", lambda _: TOKENIZER)
        code = main(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err, engines, configs)

    return start


def _resolved(config: EngineConfig) -> EngineConfig:
    from dataclasses import replace

    return replace(config, device="cpu", dtype="float32", threads=1)
