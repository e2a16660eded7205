"""The proxy's configuration: one TOML file, `BASE_RL_SECTION__KEY` in the environment, command-line overrides.

Precedence: command line > environment > file > defaults. Unknown keys are refused. The `[trainer]` section belongs
to the trainer, which validates it itself (`trainer/config/`); here it is only carried past.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from proxy.contract.reward import NameRule, RewardRules, SourceRule

ENVIRONMENT_PREFIX = "BASE_RL_"


DEFAULT_CONNECTIONS = 6
"""Three write at once and reading seldom needs more. With two, the least, one is always left for model calls."""


class ConfigurationError(Exception):
    """The configuration is wrong. The message names the key and what it accepts."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _http_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError(f"{url!r} is no address for clients: write https://rl.example.org, without ? and #")
    return url


class ServerSettings(_Section):
    """Where the proxy listens and keeps its files."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    data_dir: Path = Path(".base-rl")
    shared_data_dir: bool = False
    """Leave the data directory's mode as it is, so that an engine or a trainer under another user reaches the
    weights in it. Keys, logs and the store are private in any case."""
    weights_dir: Path | None = None
    """Versions outside this directory are refused; default: `weights` in the data directory."""
    public_url: Annotated[str, AfterValidator(_http_url)] | None = None
    """What clients should use as the address, where it is not http://host:port (behind a gateway)."""
    max_body_mib: PositiveInt = 32
    max_bodies_mib: PositiveInt | None = None
    """Bound on the bodies of all requests in work together, those up to 64 KiB not counted; default: an eighth of the
    memory that the process may use, at most 2 GiB."""
    max_bodies_mib_per_key: PositiveInt | None = None
    """The same for the requests of one key; default: half of `max_bodies_mib`."""
    max_connections: PositiveInt = 4096
    """Fewer where the limit on open files leaves room for fewer."""
    max_header_kib: PositiveInt = 64
    max_headers: PositiveInt = 200
    header_timeout_seconds: PositiveFloat = 20.0
    """From the opening of a connection, or the first byte of a later request, to the end of its headers."""
    body_timeout_seconds: PositiveFloat = 120.0
    """From the end of the headers to the end of the body."""
    answer_timeout_seconds: PositiveFloat = 120.0
    """A client that reads nothing of its answer for so long is taken to be gone."""
    stream_ping_seconds: PositiveFloat = 15.0
    stop_grace_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 7.0
    """How long calls in flight may go on once the proxy is told to stop; then they are recorded as truncated."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class RequestSettings(_Section):
    """How much one model call may hold. A call beyond a bound is a 400 before anything is rendered or tokenised."""

    max_messages: PositiveInt = 10_000
    """Messages, or items of the Responses API."""
    max_parts: PositiveInt = 10_000
    """Content parts or tool calls of one message."""
    max_tools: PositiveInt = 1_000
    max_prompt_ids: PositiveInt = 262_144
    """Token ids in all prompts of one call of `/v1/completions`."""
    max_values: PositiveInt = 100_000
    """JSON values in one body, ids of prompts not counted, and in the arguments of all its tool calls."""
    max_escapes: PositiveInt = 1_000_000
    """Backslashes in one body. The JSON parser reads a text of them in one call, which keeps all others waiting: a
    million take some hundredths of a second."""
    max_options_mib: PositiveInt = 4
    """Everything but the conversation: tools, schemas, metadata."""
    threads: PositiveInt = 2
    """Large calls that are read, rendered and tokenised at one time; others wait for their turn."""


class BootstrapSettings(_Section):
    """Keys that the proxy registers at start, if they are not yet there. `base-rl up` makes and passes them."""

    admin_key: SecretStr | None = None
    run_key: SecretStr | None = None
    trainer_key: SecretStr | None = None


_STORE_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def _store_url(url: str) -> str:
    """With the driver that the store uses. What is wrong is said without the URL, which may hold a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _STORE_DRIVERS:
        named = f"{scheme}://" if separator else "no scheme"
        raise ValueError(
            f"the store is a SQLite file or a PostgreSQL database, and this names {named}: write "
            "sqlite:////absolute/path/store.sqlite3 or postgresql://user:password@host:5432/database"
        )
    if scheme.startswith("postgresql"):
        try:
            parts = urlsplit(f"postgresql://{rest}")
            named_database = bool(parts.path.strip("/")) and (parts.port is None or parts.port > 0)
        except ValueError:
            named_database = False
        if not named_database:
            raise ValueError("write postgresql://user:password@host:5432/database, with the database's name")
    return f"{_STORE_DRIVERS[scheme]}://{rest}"


class DatabaseSettings(_Section):
    """The trajectory store."""

    url: Annotated[str, AfterValidator(_store_url)] | None = None
    """`sqlite:////path` or `postgresql://user:password@host/database`; default: SQLite at `base-rl.sqlite3` in the
    data directory."""
    synchronous: Literal["normal", "full"] | None = None
    """What a commit waits for (`docs/operating.md` has the table); default: `full` on SQLite, on PostgreSQL what
    the server is set to."""
    busy_timeout_seconds: PositiveFloat = 10.0
    """How long a write waits for another's lock."""
    when_unavailable: Literal["refuse", "serve"] = "refuse"
    """What becomes of model calls that cannot be recorded, while the database is down or the disk is full. `refuse`:
    503; `serve`: they are answered, marked `x-base-rl-unrecorded`, and not trained."""
    connect_timeout_seconds: PositiveFloat = 5.0
    """PostgreSQL: how long the server may take to let us in."""
    statement_timeout_seconds: PositiveFloat = 60.0
    """PostgreSQL: how long one statement may run."""
    connections: int = Field(default=DEFAULT_CONNECTIONS, ge=2, le=100)
    """PostgreSQL: how many connections this proxy holds at most. All its work shares them and waits for one, for
    `busy_timeout_seconds` at most; where the server allows fewer, it makes do with those."""


class EngineKind(StrEnum):
    EMBEDDED = "embedded"
    SGLANG = "sglang"
    SCRIPTED = "scripted"


def _default_sglang_venv() -> Path:
    """Where `make sglang-cpu` installs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "base-rl" / "sglang-cpu-0.5.23"


def _known_engine(kind: str) -> str:
    if kind in tuple(EngineKind) or re.match(r"https?://[^/]", kind):
        return kind
    raise ValueError(f"{kind!r} is none of embedded, sglang, scripted, or the URL (http://…) of a running SGLang")


class EngineSettings(_Section):
    """The inference engine: `embedded`, `sglang`, `scripted`, or the URL of a server that speaks SGLang's native
    API."""

    kind: Annotated[str, AfterValidator(_known_engine)] = EngineKind.EMBEDDED.value
    url: str | None = None
    """Where the engine answers. `base-rl up` fills it in for the engines that it starts."""
    connect_timeout_seconds: PositiveFloat = 5.0
    read_timeout_seconds: PositiveFloat = 600.0
    """Longest wait for the first token of a streamed answer, and for the whole of one that is not streamed."""
    stall_timeout_seconds: PositiveFloat = 300.0
    """Longest wait between two tokens of a streamed answer, never above the read timeout. Weight updates by this
    proxy do not count."""
    health_interval_seconds: PositiveFloat = 1.0
    health_timeout_seconds: PositiveFloat = 10.0
    """An engine that answers nothing at all for so long is hung: calls in flight fail, new ones are refused until it
    answers again."""
    max_concurrency: PositiveInt = 512
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of engines that `base-rl up` starts; `auto`: the GPU where nvidia-smi finds one."""
    threads: PositiveInt = 1
    """CPU threads of engines that `base-rl up` starts."""
    sglang_venv: Path = Field(default_factory=_default_sglang_venv)
    """The environment that SGLang is installed in (`make sglang-cpu`, or one of your own on a GPU machine)."""
    script: Path | None = None
    """What the scripted engine answers; default: a script that repeats what it is told."""

    @field_validator("script")
    @classmethod
    def _only_the_scripted_engine_reads_it(cls, script: Path | None, info: ValidationInfo) -> Path | None:
        kind = info.data.get("kind")
        if script is not None and kind != EngineKind.SCRIPTED:
            raise ValueError(
                f"only the scripted engine reads a script (--engine scripted), and engine.kind is {kind!r}"
            )
        return script


class SamplingMode(StrEnum):
    """What a run does with the sampling that agents ask for in training sessions."""

    RESPECT = "respect"
    RAISE_GREEDY = "raise_greedy"
    OVERRIDE = "override"


class SamplingSettings(_Section):
    mode: SamplingMode = SamplingMode.RAISE_GREEDY
    temperature: PositiveFloat = 1.0


ReasoningParserName = Literal["auto", "none", "think"]
ImageMode = Literal["refuse", "name"]


RewardNumber = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


class RewardSettings(_Section):
    """How entries about the same session, or the same turn, become one reward."""

    combine: NameRule = NameRule.WEIGHTED_SUM
    """Of several names, each times its weight. Names of weight 0 take no part."""
    sources: SourceRule = SourceRule.SUM
    """Of several sources of one name: the latest value of each, summed or averaged."""
    order: tuple[str, ...] = ()
    """`first_of` takes the first of these names that is there."""
    low: RewardNumber | None = None
    high: RewardNumber | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> RewardSettings:
        if (self.combine is NameRule.FIRST_OF) != bool(self.order):
            raise ValueError('order and combine = "first_of" belong together: give both or neither')
        if len(set(self.order)) != len(self.order):
            raise ValueError("order has a name twice")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low}, above high, which is {self.high}")
        return self


class RetentionSettings(_Section):
    """How long the content of ended sessions is kept; without a bound it stays. Erased content is gone; that the
    sessions were there, and who learnt from them, stays."""

    max_age_days: PositiveFloat | None = None
    """Since the session's end."""
    max_sessions: PositiveInt | None = None
    """Beyond so many ended sessions, those that ended first go."""
    unconsumed: bool = False
    """Also sessions that may yet be trained: ready ones and those that wait for a reward."""


RedactionRuleName = Literal["email", "phone", "credit_card", "iban", "ip", "secret"]


class RedactionSettings(_Section):
    """What is replaced in messages, requests, answers and token ids before they are stored. Redacted tokens are not
    trained."""

    rules: tuple[RedactionRuleName, ...] = ()
    """Built in."""
    patterns: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], str] = Field(default_factory=dict)
    """Regular expressions of your own, by name."""
    analyzers: tuple[str, ...] = ()
    """`module:function`: of a text, it gives (start, end) of what is to be redacted."""

    @property
    def is_on(self) -> bool:
        return bool(self.rules or self.patterns or self.analyzers)


class LimitSettings(_Section):
    """How much the agents of a run may ask for, of all proxies on its store together. None: as much as they like."""

    calls_per_minute: PositiveInt | None = None
    """Model calls that are begun."""
    tokens_per_minute: PositiveInt | None = None
    """Of prompts and answers. They are known at a call's end, so what was used too much is waited for before the
    next."""
    burst_seconds: PositiveFloat = Field(default=10.0, le=60.0)
    """How many seconds' worth of a limit may be used at once; one call at least."""
    max_waiting: NonNegativeInt | None = None
    """While more trajectories than this are ready and wait for the trainer, no session is opened for training."""

    @property
    def bound_calls(self) -> bool:
        """Whether every call must be asked for."""
        return self.calls_per_minute is not None or self.tokens_per_minute is not None

    @property
    def are_on(self) -> bool:
        return self.bound_calls or self.max_waiting is not None


class RunSettings(_Section):
    """One policy being trained."""

    name: str = Field(default="policy", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str = ""
    """Directory or Hugging Face id of the base model; version 0."""
    sampling: SamplingSettings = SamplingSettings()
    max_new_tokens: PositiveInt = 1024
    """Bound on one answer where the client asks for none or for more."""
    tool_parser: str = "auto"
    """How the model writes tool calls; `auto`: as its chat template does. `none`: they stay text."""
    reasoning_parser: ReasoningParserName = "auto"
    """How the model writes what it thinks before it answers; `think`: between `<think>` and `</think>`."""
    allow_control_tokens: bool = False
    """Whether texts of clients, tools and answers may write control tokens of the model, such as `<|im_end|>`. False:
    they are tokenised as the text that they are, so that only the chat template begins and ends turns."""
    images: ImageMode = "refuse"
    """Models read text only. `refuse`: a call with an image is a 400; `name`: the model reads "[image]" in its
    place, and the answer's `x-base-rl-warning` says so."""
    repeated_names: Literal["next_attempt", "refuse"] = "next_attempt"
    """A new conversation under the name of a session that has ended. `next_attempt`: it opens the next attempt of
    that name; `refuse`: it is a 410. Names that clients keep beyond an attempt, such as a project's, always go on."""
    session_idle_seconds: PositiveFloat = 900.0
    """An open session without a call for this long ends."""
    reward_timeout_seconds: PositiveFloat = 86400.0
    """An ended session without a reward for this long expires: it will not be trained."""
    group_timeout_seconds: PositiveFloat = 60.0
    """A group still incomplete this long after its first end is trained with what it has (two at least)."""
    lease_seconds: PositiveFloat = 120.0
    """A claim whose trainer does not renew it for this long returns its trajectories."""
    reward_weights: dict[str, RewardNumber] = Field(default_factory=dict)
    """Weight per reward name in the combined reward; names not listed weigh 1."""
    rewards: RewardSettings = RewardSettings()
    retention: RetentionSettings = RetentionSettings()
    redaction: RedactionSettings = RedactionSettings()
    limits: LimitSettings = LimitSettings()

    @property
    def reward_rules(self) -> RewardRules:
        return RewardRules(
            weights=self.reward_weights,
            combine=self.rewards.combine,
            sources=self.rewards.sources,
            order=self.rewards.order,
            low=self.rewards.low,
            high=self.rewards.high,
        )


class Settings(BaseSettings):
    """Everything the proxy can be told. Build it with `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    server: ServerSettings = ServerSettings()
    requests: RequestSettings = RequestSettings()
    bootstrap: BootstrapSettings = BootstrapSettings()
    database: DatabaseSettings = DatabaseSettings()
    engine: EngineSettings = EngineSettings()
    run: RunSettings = RunSettings()
    trainer: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment over `init` values, which carry the file; the command line is written into the environment's
        place by `load_settings`."""
        return (env_settings, init_settings)

    @property
    def database_url(self) -> str:
        return self.database.url or f"sqlite+aiosqlite:///{self.server.data_dir.resolve() / 'base-rl.sqlite3'}"

    @property
    def weights_dir(self) -> Path:
        """The directory in which trainers publish: one directory per run, one below it per version."""
        return (self.server.weights_dir or self.server.data_dir / "weights").resolve()


def load_settings(config_file: Path | None = None, overrides: dict[str, dict[str, Any]] | None = None) -> Settings:
    """Reads file and environment, lays `overrides` ({section: {key: value}}) over both.

    Raises ConfigurationError with one line per wrong key.
    """
    _refuse_unknown_sections(os.environ)
    values: dict[str, Any] = {}
    if config_file is not None:
        try:
            values = tomllib.loads(config_file.read_text())
        except OSError as error:
            raise ConfigurationError(f"cannot read {config_file}: {error.strerror or error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{config_file} is not valid TOML: {error}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{config_file} is not valid TOML: it is not UTF-8") from error
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise ConfigurationError(describe(error)) from error
    for section, keys in (overrides or {}).items():
        current = getattr(settings, section)
        try:
            changed = type(current).model_validate({**current.model_dump(), **keys})
        except ValidationError as error:
            raise ConfigurationError(describe(error, section)) from error
        settings = settings.model_copy(update={section: changed})
    return settings


def opentelemetry_is_set_up() -> bool:
    """By its own variables (`OTEL_…`) or FastAPI's (`FASTAPI_OTEL_…`)."""
    return any(name.startswith(("OTEL_", "FASTAPI_OTEL_")) for name in os.environ)


def as_environment(settings: Settings) -> dict[str, str]:
    """The environment that gives another process these very settings, whatever its own environment and file say.

    Keys that are None are left out, and so are `bootstrap` and `trainer`.
    """
    environment: dict[str, str] = {}

    def lay_out(name: str, section: BaseModel) -> None:
        for key in type(section).model_fields:
            value = getattr(section, key)
            path = f"{name}__{key.upper()}"
            if isinstance(value, BaseModel):
                lay_out(path, value)
            elif isinstance(value, dict | tuple):
                environment[path] = json.dumps(value)
            elif value is not None:
                environment[path] = str(value)

    for name in ("server", "requests", "database", "engine", "run"):
        lay_out(f"{ENVIRONMENT_PREFIX}{name.upper()}", getattr(settings, name))
    return environment


def _refuse_unknown_sections(environment: Mapping[str, str]) -> None:
    """A misspelt section in the environment would otherwise be passed over in silence."""
    for name in environment:
        section, separator, _ = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and separator and section not in Settings.model_fields:
            known = ", ".join(Settings.model_fields)
            raise ConfigurationError(f"{name}: there is no section {section!r}; the sections are {known}")


def describe(error: ValidationError, *within: str) -> str:
    """A validation error as lines of `key: what is wrong`; `within` is the path to what was validated."""
    lines = []
    for detail in error.errors():
        key = ".".join(str(part) for part in (*within, *detail["loc"]))
        what = {"extra_forbidden": "there is no such key", "model_type": f"write it as a section, [{key}]"}
        lines.append(f"{key}: {what.get(detail['type'], detail['msg'].removeprefix('Value error, '))}")
    return "\n".join(lines)
