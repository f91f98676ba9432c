"""`paceline serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.api.options import options
from paceline.api.server.settings_values import changed
from paceline.cli.console import waiting
from paceline.cli.flags import with_flags
from paceline.cli.serve_flags import Serving, serving_flags
from paceline.core.errors import ConfigError
from paceline.core.garbage import only_new_garbage

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.server.settings import ServerSettings
    from paceline.core.stages import Stages

log = logging.getLogger(__name__)

EXAMPLES = (
    "paceline serve",
    "paceline serve ./my-model --host 0.0.0.0 --port 8000 --api-key SECRET",
    "paceline serve my-model.gguf --spec suffix --max-num-seqs 32 --max-model-len 8192",
    "paceline serve --config serve.yaml",
    "PACELINE_SERVE_API_KEY=SECRET paceline serve",
)
_NEEDED = ("fastapi", "httptools", "orjson", "prometheus_client", "uvicorn", "yaml")
_CLOSE_S = 10.0  # for the engine's last step


def _serve(
    named: Annotated[
        str | None,
        Parameter(
            name="MODEL", help="folder, GGUF file, hub id, or 'default' (SmolLM2-135M-Instruct)"
        ),
    ] = None,
    /,
    *,
    serving: Serving,
) -> int:
    """Serve a model over HTTP, with OpenAI's interface.

    Every flag may also stand in the environment (PACELINE_SERVE_MAX_LEN=4096) or in a YAML file
    (--config). Ctrl-C or SIGTERM ends the server once its answers are whole, a second one at once.
    """
    _check_installed()
    config = serving.config
    if named is not None:
        if config.model not in {"default", named}:
            msg = (
                f"two models are named, {named} and {config.model}; one is served; name it once, as "
                "MODEL or as --model"
            )
            raise ConfigError(msg)
        config = replace(config, model=named)
    return _run(replace(serving, config=config))


serve = with_flags(_serve, {Serving: serving_flags})


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        msg = (
            f"the server needs {', '.join(missing)}, which are not installed; the rest of Paceline "
            "works without; install them with: pip install 'paceline[server]'"
        )
        raise ConfigError(msg)


def _run(serving: Serving) -> int:
    from paceline.api.server import life, port_file
    from paceline.api.server.families import check_parsers
    from paceline.api.server.keys import Keys
    from paceline.api.server.stage_clock import StageClock
    from paceline.core.stages import silent

    settings = serving.settings
    Keys.of(settings)  # mistakes are told before a model is loaded for minutes
    check_parsers(settings.tool_call_parser, settings.reasoning_parser)
    template = _template(settings)
    if settings.port_file is not None:
        if settings.uds is not None:
            msg = "port_file is given with uds, where there is no port to write; leave one of them out"
            raise ConfigError(msg)
        port_file.check(settings.port_file)
    listening = life.bound(settings)
    clock = StageClock()
    llm: LLM | None = None
    try:
        with waiting(
            f"loading {serving.config.model} (the first start takes longer)",
            "capturing CUDA graphs",
        ) as bar:
            llm = _loaded(serving, bar, clock if settings.stage_metrics else silent)
        if template is not None:
            llm.tokenizer.chat_templates = {"default": template}
        code = _live(llm, serving, listening, clock)
    finally:
        listening.close()
        if llm is None and settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)
        ended = llm is None or life.close_or_leave(llm.close, _CLOSE_S)
    if not ended:
        log.error("the engine's step does not end; the process ends without it")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _loaded(serving: Serving, bar: Callable[[int, int], None], stages: Stages) -> LLM:
    from paceline.api.llm import LLM
    from paceline.api.server import port_file
    from paceline.models.source import resolve

    resolve(serving.config.model)  # a mistake in its name is no reason to forget another's port
    if serving.settings.port_file is not None:
        port_file.forget(serving.settings.port_file)
    return LLM(config=serving.config, progress=bar, stages=stages)


def _live(llm: LLM, serving: Serving, listening: Any, clock: Any) -> int:
    from paceline.api.server import life, port_file
    from paceline.api.server.app import create_app
    from paceline.api.server.metrics import Metrics
    from paceline.api.server.service import Service

    settings = serving.settings
    if not settings.served_model_name:
        settings = replace(settings, served_model_name=(serving.config.model,))
    metrics = Metrics(
        settings.served_model_name[0],
        num_positions=llm.spec.max_depth,
        vllm_names=settings.vllm_metrics,
    )
    clock.tell = metrics.observe_stage
    service = Service(llm, settings, listener=metrics)
    app = create_app(service, metrics=metrics)
    log.info("configuration, where it differs from the defaults: %s", _difference(llm, settings))
    for note in llm.notes:
        log.info("note: %s", note)

    def ready() -> None:
        if settings.port_file is not None:
            port_file.write(settings.port_file, life.port_of(listening))
        log.info(
            "serving %s at %s",
            ", ".join(settings.served_model_name),
            life.address_of(listening, settings),
        )

    with _logs(), only_new_garbage():
        return life.Life(app, service, listening, ready=ready).run()


def _template(settings: ServerSettings) -> str | None:
    """The chat template that takes the place of the model's own."""
    if settings.chat_template is None:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = (
            f"chat_template {settings.chat_template} cannot be read ({error}); give a file with a "
            "Jinja template"
        )
        raise ConfigError(msg) from error


def _difference(llm: LLM, settings: ServerSettings) -> str:
    """Engine and server, as flags would say it."""
    parts = {"engine": llm.config, "cache": llm.config.cache, "draft": llm.config.draft}
    found = {
        option.name: getattr(parts[option.part], option.field)
        for option in options().values()
        if getattr(parts[option.part], option.field) != option.default
    }
    return json.dumps({**found, **changed(settings)}, ensure_ascii=False, default=str)


@contextmanager
def _logs() -> Iterator[None]:
    """uvicorn's lines look like ours."""
    ours = logging.getLogger("paceline").handlers
    loggers = [logging.getLogger("uvicorn.error"), logging.getLogger("uvicorn.access")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger, level in zip(loggers, (logging.WARNING, logging.INFO), strict=True):
        logger.handlers += ours
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.handlers = [h for h in logger.handlers if h not in ours]
            logger.setLevel(level)
            logger.propagate = propagate
