"""Where the proxy listens, how much one request may hold, and the keys of its first start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, SecretStr

from proxy.contract.object_store import check_url
from proxy.settings.destinations import Destination
from proxy.settings.section import Section


def _http_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError(f"{url!r} is no address for clients: write https://rl.example.org, without ? and #")
    return url


class ServerSettings(Section):
    """Where the proxy listens and keeps its files."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    data_dir: Path = Path(".base-rl")
    shared_data_dir: bool = False
    """Leave the data directory's mode as it is, so that an engine or a trainer under another user reaches the
    weights in it. Keys, logs and the store are private in any case."""
    weights_dir: Path | None = None
    """Versions whose weights lie outside this directory are refused; default: `weights` in the data directory."""
    weights_url: Annotated[str, AfterValidator(check_url)] | None = None
    """An object store, s3://BUCKET/PREFIX, from which versions are fetched that are not in the directory."""
    weights_cache_dir: Path | None = None
    """Files of versions that are fetched from an object store or published as differences, from which engines read;
    default: `weights-cache` in the data directory."""
    weights_memory_dir: Path | None = None
    """Shared memory in which trainers on this machine publish (`trainer.weights.memory_directory`); default:
    /dev/shm/base-rl-UID."""
    weights_senders: tuple[Destination, ...] = ("127.0.0.0/8", "localhost")
    """Hosts and networks from which engines receive weights that trainers send (`trainer.weights.type =
    "collective"`)."""
    weights_cache_gigabytes: PositiveFloat = 50.0
    """Bound on that directory, beyond which versions that were used longest ago are removed."""
    exports_dir: Path | None = None
    """Directory to which background jobs write exports; default: `exports` in the data directory."""
    exports_url: Annotated[str, AfterValidator(check_url)] | None = None
    """An object store, s3://BUCKET/PREFIX, to which they write instead."""
    max_norm_change: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10.0
    """A version is refused if the root mean square of a tensor is this many times larger or smaller than in its
    parent; below 0.01, in a fit below 0.1, it counts as that."""
    public_url: Annotated[str, AfterValidator(_http_url)] | None = None
    """The address to show to clients if it is not http://host:port, for example behind a gateway."""
    max_body_mib: PositiveInt = 32
    max_bodies_mib: PositiveInt | None = None
    """Bound on the total size of the bodies in work, those up to 64 KiB not counted; default: an eighth of the memory
    that the process may use, at most 2 GiB."""
    max_bodies_mib_per_key: PositiveInt | None = None
    """Bound on the bodies of one key's requests; default: half of `max_bodies_mib`."""
    max_connections: PositiveInt = 4096
    """The proxy accepts fewer where the limit on open files leaves room for fewer."""
    max_header_kib: PositiveInt = 64
    max_headers: PositiveInt = 200
    header_timeout_seconds: PositiveFloat = 20.0
    """From the opening of a connection, or the first byte of a later request, to the end of its headers."""
    body_timeout_seconds: PositiveFloat = 120.0
    """From the end of the headers to the end of the body."""
    answer_timeout_seconds: PositiveFloat = 120.0
    """A client that reads nothing of its answer for this long is disconnected."""
    stream_ping_seconds: PositiveFloat = 15.0
    stop_grace_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 7.0
    """How long calls in flight may continue after a signal to stop; then they are recorded as truncated."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class RequestSettings(Section):
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
    """Backslashes in one body. The JSON parser decodes a string in one call, during which every other request waits:
    a million backslashes take some hundredths of a second."""
    max_options_mib: PositiveInt = 4
    """Size of a body's fields other than the conversation: tools, schemas, metadata."""
    threads: PositiveInt = 2
    """Large calls that are parsed, rendered and tokenised at the same time; further ones wait."""


class BootstrapSettings(Section):
    """Keys that the proxy registers at start, if they are not yet there. `base-rl up` makes and passes them."""

    admin_key: SecretStr | None = None
    run_key: SecretStr | None = None
    trainer_key: SecretStr | None = None
