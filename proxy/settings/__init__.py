"""The proxy's configuration: one TOML file, `BASE_RL_SECTION__KEY` in the environment, and the command line.

Precedence: command line > environment > file > defaults. Unknown keys are refused. The `[trainer]` section belongs to
the trainer, which checks it itself (`trainer/config/`). Only this package reads the environment and the file.
"""

from __future__ import annotations

from proxy.settings.content import RedactionRuleName, RedactionSettings, RetentionSettings
from proxy.settings.database import DEFAULT_CONNECTIONS, DatabaseSettings
from proxy.settings.engine import EngineKind, EngineSettings, NamedEngineSettings
from proxy.settings.jobs import JobSettings
from proxy.settings.judges import JudgeKind, JudgeSettings, JudgingSettings, ProviderSettings
from proxy.settings.limits import GivenLimits, LimitSettings, UsageLimits
from proxy.settings.loading import Settings, as_environment, describe, load_settings, opentelemetry_is_set_up
from proxy.settings.outbound import OutboundSettings
from proxy.settings.projects import DEFAULT_PROJECT, ProjectName
from proxy.settings.release import GuardSettings, ReleaseSettings
from proxy.settings.rewards import RewardNumber, RewardSettings
from proxy.settings.run import (
    ImageMode,
    ReasoningParserName,
    RunSettings,
    SamplingMode,
    SamplingSettings,
)
from proxy.settings.section import ConfigurationError
from proxy.settings.server import BootstrapSettings, RequestSettings, ServerSettings
from proxy.settings.shadow import ShadowSettings
from proxy.settings.texts import TextSettings

__all__ = [
    "DEFAULT_CONNECTIONS",
    "DEFAULT_PROJECT",
    "BootstrapSettings",
    "ConfigurationError",
    "DatabaseSettings",
    "EngineKind",
    "EngineSettings",
    "GivenLimits",
    "GuardSettings",
    "ImageMode",
    "JobSettings",
    "JudgeKind",
    "JudgeSettings",
    "JudgingSettings",
    "LimitSettings",
    "NamedEngineSettings",
    "OutboundSettings",
    "ProjectName",
    "ProviderSettings",
    "ReasoningParserName",
    "RedactionRuleName",
    "RedactionSettings",
    "ReleaseSettings",
    "RequestSettings",
    "RetentionSettings",
    "RewardNumber",
    "RewardSettings",
    "RunSettings",
    "SamplingMode",
    "SamplingSettings",
    "ServerSettings",
    "Settings",
    "ShadowSettings",
    "TextSettings",
    "UsageLimits",
    "as_environment",
    "describe",
    "load_settings",
    "opentelemetry_is_set_up",
]
