"""ServerSettings: everything the server itself can be told; flags, environment and YAML are made of it.

`help` in a field's metadata is the flag's help text, `group` its place in `--help`, `told` says who may know
its value. Names are vLLM's where the meaning is equal. What the engine is built from is `core.config.EngineConfig`.
Not for: plain values that become settings, and back (settings_values.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.core.errors import ConfigError

NETWORK, KEYS, LIMITS, LIFE, ANSWERS, METRICS, PAGES = (
    "Address",
    "Keys and browsers",
    "Limits",
    "Life cycle",
    "Answers",
    "Metrics and logs",
    "Pages",
)
# Who may know a field's value: whoever asks /server_info; whoever reads the log; nobody.
Told = Literal["all", "log", "none"]
SpecMetrics = Literal["none", "summary", "detailed"]


def _doc(group: str, text: str, *, told: Told = "all") -> Mapping[str, Any]:
    return {"group": group, "help": text, "told": told}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a model is served. Sizes in bytes, times in seconds.

    Raises:
        ConfigError: values that cannot be served; all problems at once.
    """

    host: str = field(
        default="127.0.0.1",
        metadata=_doc(NETWORK, "address to listen at; 0.0.0.0: every IPv4 interface"),
    )
    port: int = field(
        default=8000,
        metadata=_doc(NETWORK, "port to listen at; 0: a free one, which the log names"),
    )
    port_file: str | None = field(
        default=None,
        metadata=_doc(NETWORK, "write the port there once requests are taken", told="log"),
    )
    uds: str | None = field(
        default=None,
        metadata=_doc(NETWORK, "listen at this Unix socket instead of a port", told="log"),
    )
    root_path: str = field(
        default="", metadata=_doc(NETWORK, "path under which a proxy shows this server")
    )
    ssl_certfile: str | None = field(
        default=None, metadata=_doc(NETWORK, "certificate (PEM)", told="log")
    )
    ssl_keyfile: str | None = field(
        default=None, metadata=_doc(NETWORK, "its private key (PEM)", told="log")
    )
    ssl_ca_certs: str | None = field(
        default=None,
        metadata=_doc(
            NETWORK, "ask clients for a certificate of one of these authorities (PEM)", told="log"
        ),
    )

    api_key: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            KEYS, "a key that clients must show; give it several times for several", told="none"
        ),
    )
    api_key_file: str | None = field(
        default=None,
        metadata=_doc(KEYS, "file with one key a line; # begins a comment", told="log"),
    )
    cache_scope: Literal["shared", "key"] = field(
        default="shared",
        metadata=_doc(
            KEYS,
            "who shares cached prefixes and suffixes: all, or the requests of one key; a request's "
            "cache_salt separates in both cases",
        ),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=_doc(KEYS, "web origins that may call this server (CORS); * is any"),
    )
    allowed_methods: tuple[str, ...] = field(default=("*",), metadata=_doc(KEYS, "CORS: methods"))
    allowed_headers: tuple[str, ...] = field(default=("*",), metadata=_doc(KEYS, "CORS: headers"))
    allow_credentials: bool = field(default=False, metadata=_doc(KEYS, "CORS: credentials"))

    max_queued_requests: int = field(
        default=256,
        metadata=_doc(LIMITS, "answers that may wait for a row; further requests get 503"),
    )
    max_queued_tokens: int | None = field(
        default=None,
        metadata=_doc(LIMITS, "prompt tokens that may wait; default: any number"),
    )
    max_body_bytes: int = field(
        default=8 * 2**20, metadata=_doc(LIMITS, "longest request body; longer ones get 413")
    )
    max_json_depth: int = field(
        default=64, metadata=_doc(LIMITS, "deepest nesting of a request's JSON")
    )
    max_header_bytes: int = field(
        default=64 * 2**10, metadata=_doc(LIMITS, "longest headers of a request, together")
    )
    max_headers: int = field(default=100, metadata=_doc(LIMITS, "most headers of a request"))
    max_connections: int | None = field(
        default=None,
        metadata=_doc(LIMITS, "connections at a time; further ones get 503; default: any number"),
    )
    body_timeout: float = field(
        default=60.0,
        metadata=_doc(LIMITS, "seconds that a request's headers and body may take to come"),
    )
    write_timeout: float = field(
        default=300.0,
        metadata=_doc(
            LIMITS, "a client that has not taken what was sent for so many seconds is given up"
        ),
    )

    timeout_keep_alive: float = field(
        default=75.0, metadata=_doc(LIFE, "seconds that an idle connection is kept")
    )
    sse_keep_alive_interval: float = field(
        default=15.0,
        metadata=_doc(LIFE, "after so many seconds without news a stream gets a comment; 0: never"),
    )
    drain_timeout: float = field(
        default=30.0,
        metadata=_doc(
            LIFE, "after SIGTERM running answers have so many seconds before they are ended"
        ),
    )
    watchdog_timeout: float = field(
        default=120.0,
        metadata=_doc(
            LIFE, "/health is 503 once a step of the engine takes more seconds than this"
        ),
    )
    health_generate_timeout: float = field(
        default=20.0,
        metadata=_doc(
            LIFE, "/health_generate is 503 once its token has not come for so many seconds"
        ),
    )

    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata=_doc(ANSWERS, "names under which the model is asked for; default: MODEL"),
    )
    chat_template: str | None = field(
        default=None,
        metadata=_doc(ANSWERS, "file with a chat template in place of the model's own", told="log"),
    )
    tool_call_parser: str | None = field(
        default=None,
        metadata=_doc(ANSWERS, "how the model writes tool calls; default: seen from its template"),
    )
    reasoning_parser: str | None = field(
        default=None,
        metadata=_doc(ANSWERS, "how the model marks reasoning; default: seen from its template"),
    )
    disable_any_whitespace: bool = field(
        default=False,
        metadata=_doc(
            ANSWERS,
            "JSON that a request's format asks for has no white space between its parts, unless the "
            "request says otherwise",
        ),
    )
    strict: bool = field(
        default=False,
        metadata=_doc(ANSWERS, "refuse fields that are not known, which are ignored otherwise"),
    )
    max_stored_responses: int = field(
        default=256, metadata=_doc(ANSWERS, "answers of /v1/responses kept in memory")
    )
    per_request_spec_decode_metrics: SpecMetrics = field(
        default="summary",
        metadata=_doc(
            ANSWERS, "what an answer says of its own speculation; detailed: of each step too"
        ),
    )
    enable_draft_usage: bool = field(
        default=False,
        metadata=_doc(
            ANSWERS,
            "usage.completion_tokens_details counts accepted and rejected draft tokens too, which "
            "billing code may read",
        ),
    )

    vllm_metrics: bool = field(
        default=False,
        metadata=_doc(METRICS, "/metrics has vLLM's names too, under vllm:"),
    )
    stage_metrics: bool = field(
        default=True,
        metadata=_doc(METRICS, "histograms of the time that the parts of a step take"),
    )
    access_log: bool = field(default=False, metadata=_doc(METRICS, "a log line per request"))
    disable_fastapi_docs: bool = field(
        default=False, metadata=_doc(PAGES, "no /docs and no /openapi.json")
    )
    disable_page: bool = field(default=False, metadata=_doc(PAGES, "no page at /"))

    def __post_init__(self) -> None:
        """Refuse what cannot be served."""
        problems = list(_problems(self))
        if problems:
            msg = "invalid server settings: " + "; ".join(problems)
            raise ConfigError(msg)


def _problems(settings: ServerSettings) -> list[str]:
    found = []
    if not 0 <= settings.port <= 65535:
        found.append(f"port is {settings.port}; 0 to 65535 is possible; choose one")
    for name, least in _LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            found.append(f"{name} is {value}; at least {least} is possible; raise it")
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        found.append("of ssl_certfile and ssl_keyfile one is missing; give both, or none")
    if settings.ssl_ca_certs is not None and settings.ssl_certfile is None:
        found.append("ssl_ca_certs needs ssl_certfile and ssl_keyfile; give them too")
    if settings.root_path and (
        not settings.root_path.startswith("/") or settings.root_path.endswith("/")
    ):
        found.append(f"root_path is {settings.root_path!r}; write it as /prefix")
    if any(not key.strip() for key in settings.api_key):
        found.append("an api_key is empty; leave it out for a server without keys")
    if any(not name.strip() for name in settings.served_model_name):
        found.append("a served_model_name is empty; leave it out for the model's own")
    if settings.allow_credentials and "*" in settings.allowed_origins:
        found.append("allow_credentials with any origin is refused by browsers; name the origins")
    return found


# Field -> its least value.
_LEAST: Mapping[str, float] = {
    "max_queued_requests": 0,
    "max_queued_tokens": 1,
    "max_body_bytes": 1024,
    "max_json_depth": 8,
    "max_header_bytes": 1024,
    "max_headers": 8,
    "max_connections": 1,
    "body_timeout": 0.1,
    "write_timeout": 1.0,
    "timeout_keep_alive": 0.0,
    "sse_keep_alive_interval": 0.0,
    "drain_timeout": 0.0,
    "watchdog_timeout": 1.0,
    "health_generate_timeout": 0.1,
    "max_stored_responses": 0,
}
