"""Load, once for each base model and on demand, the parts of a model call that depend on the model."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.calls.choices import ChoicePlanner
from proxy.calls.observer import TurnObserver
from proxy.calls.prompts import PromptPlanner
from proxy.calls.raw_prompts import RawPromptPlanner
from proxy.calls.redacting import TurnRedactor
from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.errors import InvalidRequest, Unavailable
from proxy.http.workers import Workers
from proxy.redaction.rules import load_rules
from proxy.runs.service import RunView
from proxy.settings import ConfigurationError, RunSettings
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.output import output_format
from proxy.tokens.raw import CompletionIndex
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import TrajectoryStore

# A tokenizer takes tens of megabytes. A runtime that was dropped is loaded again in about a second.
_MOST_RUNTIMES = 8

# Runs whose settings were compared before. An entry is a few hundred bytes.
_MOST_RUNS = 4096


class LoadTemplate(Protocol):
    """Load a model's template and tokenizer; blocking. `ChatTemplate.load`, but for tests."""

    def __call__(self, model: str, *, allow_control_tokens: bool) -> ChatTemplate: ...


class ModelRuntime:
    """Everything that reads, plans and decodes the calls of one base model. Runs with equal settings share it.

    Immutable but for its caches; a call keeps its runtime until it ends, also when `Runtimes` has dropped it.
    """

    def __init__(
        self,
        template: ChatTemplate,
        settings: RunSettings,
        *,
        trajectories: TrajectoryStore,
        workers: Workers,
        clock: Clock,
        observer: TurnObserver | None,
    ) -> None:
        """Raise ConfigurationError for redaction rules that cannot be used. May take a second: call on a thread."""
        self.template = template
        self.names_images = settings.images == "name"
        """Whether images in a request are replaced by a text, instead of refusing the request."""
        self.output = output_format(
            template, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
        )
        hidden = template.special_ids - template.added_ids(self.output.kept_texts)
        self.decoder = TokenDecoder(template.tokenizer, hidden=hidden)
        self.choices = ChoicePlanner(template, self.output, clock)
        self.prompts = PromptPlanner(template, trajectories, workers)
        self.completions = CompletionIndex()
        self.raw_prompts = RawPromptPlanner(template, self.decoder, trajectories, self.completions, workers)
        self.redactor: TurnRedactor | None = None
        if settings.redaction.is_on:
            self.redactor = TurnRedactor(load_rules(settings.redaction), template, self.decoder, observer)

    @property
    def context_length(self) -> int:
        """The largest number of tokens that a prompt and its answer may have together."""
        return self.template.context_length

    @property
    def vocabulary_size(self) -> int:
        """The number of ids that the model can answer with."""
        return self.template.model_vocabulary_size

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names of the arguments that the template reads beside messages and tools."""
        return self.template.known_arguments

    @property
    def system_anywhere(self) -> bool:
        """Whether the template writes system messages after the first message too."""
        return self.template.system_anywhere


class RunModel(msgspec.Struct, frozen=True):
    """The run that a call is for, and the runtime of the run's base model."""

    run: RunView
    runtime: ModelRuntime


class _RuntimeKey(NamedTuple):
    """The base model and the settings of a run that decide its runtime. `redaction` is JSON."""

    base_model: str
    tool_parser: str
    reasoning_parser: str
    allow_control_tokens: bool
    images: str
    redaction: str


class Runtimes:
    """Runtimes by base model and settings. At most `most` stay in memory; the least recently used are dropped."""

    def __init__(
        self,
        *,
        trajectories: TrajectoryStore,
        workers: Workers,
        clock: Clock,
        observer: TurnObserver | None = None,
        load_template: LoadTemplate = ChatTemplate.load,
        most: int = _MOST_RUNTIMES,
    ) -> None:
        self._trajectories = trajectories
        self._workers = workers
        self._clock = clock
        self._observer = observer
        self._load_template = load_template
        self._runtimes: BoundedCache[_RuntimeKey, ModelRuntime] = BoundedCache(most)
        self._loading: dict[_RuntimeKey, asyncio.Task[ModelRuntime]] = {}
        # Every call needs the key of its run's runtime, and settings are parsed once while they do not change: so
        # the key is made once for each settings object.
        self._keys: BoundedCache[RunId, tuple[RunSettings, _RuntimeKey]] = BoundedCache(_MOST_RUNS)

    async def of(self, run: RunView) -> ModelRuntime:
        """Return the runtime of the run's model, loading it first if need be. Raise Unavailable if that fails."""
        runtime = self.loaded(run)
        if runtime is not None:
            return runtime
        try:
            return await self.load(run)
        except ConfigurationError as error:
            raise Unavailable(
                f"the model of the run {run.name!r} cannot be loaded: {error}", retry_after=30.0
            ) from error

    def loaded(self, run: RunView) -> ModelRuntime | None:
        """Return the runtime of the run's model if it is in memory."""
        return self._runtimes.get(self._key(run))

    def context_length(self, run: RunView) -> int | None:
        """Return the context length of the run's model in tokens; None if it is not in memory."""
        runtime = self.loaded(run)
        return None if runtime is None else runtime.context_length

    async def load(self, run: RunView) -> ModelRuntime:
        """Load the runtime of the run's model. Demands that arrive meanwhile share one load, which goes on when the
        request that began it is cancelled. Raise ConfigurationError for a model or rules that cannot be loaded."""
        return await self._shared_load(self._key(run), run.settings)

    async def check(self, base_model: str, settings: RunSettings) -> None:
        """Load the runtime that a run with these settings would have, and render one message with its template.

        Raise ConfigurationError as `load` does, and for a template that fails.
        """
        key = _key_of(base_model, settings)
        runtime = self._runtimes.get(key)
        if runtime is None:
            runtime = await self._shared_load(key, settings)
        try:
            runtime.template.render([{"role": "user", "content": "Hello"}], None, generation_prompt=True)
        except InvalidRequest as error:
            raise ConfigurationError(f"the chat template of {base_model} cannot render a message: {error}") from error

    def forget_texts(self) -> None:
        """Forget everything that is remembered of requests' texts."""
        for _, runtime in self._runtimes.items():
            runtime.template.forget_texts()

    async def aclose(self) -> None:
        """Stop waiting for loads under way. Their threads end by themselves."""
        loading = list(self._loading.values())
        for load in loading:
            load.cancel()
        await asyncio.gather(*loading, return_exceptions=True)

    async def _shared_load(self, key: _RuntimeKey, settings: RunSettings) -> ModelRuntime:
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(
                self._load(key, settings), name=f"load {key.base_model}"
            )
            loading.add_done_callback(lambda ended: self._loaded(key, ended))
        return await asyncio.shield(loading)

    async def _load(self, key: _RuntimeKey, settings: RunSettings) -> ModelRuntime:
        # A thread of its own: a download may take minutes, and the workers are there for large requests.
        runtime = await asyncio.to_thread(self._make, key.base_model, settings)
        self._runtimes.put(key, runtime)
        return runtime

    def _make(self, base_model: str, settings: RunSettings) -> ModelRuntime:
        return ModelRuntime(
            self._load_template(base_model, allow_control_tokens=settings.allow_control_tokens),
            settings,
            trajectories=self._trajectories,
            workers=self._workers,
            clock=self._clock,
            observer=self._observer,
        )

    def _loaded(self, key: _RuntimeKey, ended: asyncio.Task[ModelRuntime]) -> None:
        del self._loading[key]
        if not ended.cancelled():
            ended.exception()  # or asyncio logs it as never retrieved when every waiter was cancelled

    def _key(self, run: RunView) -> _RuntimeKey:
        settings = run.settings
        known = self._keys.get(run.id)
        if known is not None and known[0] is settings:
            return known[1]
        key = _key_of(run.base_model, settings)
        self._keys.put(run.id, (settings, key))
        return key


def _key_of(base_model: str, settings: RunSettings) -> _RuntimeKey:
    return _RuntimeKey(
        base_model=base_model,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        allow_control_tokens=settings.allow_control_tokens,
        images=settings.images,
        redaction=settings.redaction.model_dump_json(),
    )
