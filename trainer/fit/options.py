"""The options of `base-rl fit`, or `python -m trainer fit`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.config import PreferenceForm, merge, parse_assignment
from trainer.errors import ConfigurationError

SFT, DPO, KTO, REWARD_MODEL = "sft", "dpo", "kto", "reward-model"

RATES = {SFT: 1e-5, DPO: 1e-6, KTO: 1e-6, REWARD_MODEL: 1e-5}
COLUMNS = {
    SFT: "messages, or prompt and completion",
    DPO: "prompt, chosen and rejected",
    KTO: "prompt, completion and label",
    REWARD_MODEL: "prompt, chosen and rejected",
}
"""The columns of rows for each kind (`rows.py`)."""
# Options that select sessions or preferences, and do not apply to rows of files.
_OF_SESSIONS = ("since", "until", "version", "min_reward", "task", "source", "session", "all", "threshold", "from_")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with status 2 for unknown options, and after --help."""
    return _parser().parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for options that contradict each other."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError("fit runs in one process: start it without torchrun")
    if not 0 <= options.held_out < 1:
        raise ConfigurationError(f"--held-out: {options.held_out} is not a share below 1")
    for name in ("epochs", "batch"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name}: 1 at least")
    for name in ("learning_rate", "beta", "desirable_weight", "undesirable_weight"):
        value = getattr(options, name, None)
        if value is not None and not value > 0:
            raise ConfigurationError(f"--{name.replace('_', '-')}: a number above 0")
    if options.kind == REWARD_MODEL:
        there: Path = options.output
        if there.exists() and (not there.is_dir() or any(there.iterdir())):
            raise ConfigurationError(f"--output: {there} is there and not empty: name another folder")
    if options.kind == DPO:
        if not 0 <= options.label_smoothing < 0.5:
            raise ConfigurationError(
                "--label-smoothing: 0 or more, and below 0.5: the share of labels that are wrong"
            )
        if options.label_smoothing and options.loss is PreferenceForm.IPO:
            raise ConfigurationError("--label-smoothing: ipo has none; use --loss sigmoid or sigmoid_norm")
    _check_source(options)


def _check_source(options: argparse.Namespace) -> None:
    """Raise ConfigurationError unless exactly one source of data is given."""
    if options.data:
        given = [name for name in _OF_SESSIONS if not _is_default(getattr(options, name, None))]
        if given:
            option = f"--{given[0].rstrip('_').replace('_', '-')}"
            raise ConfigurationError(f"{option}: it is about sessions, and --data names files of rows; leave one out")
        return
    if options.kind == KTO and options.threshold is None:
        raise ConfigurationError(
            "say which sessions are desirable: --threshold X calls those with at least this reward so, and the others"
            " undesirable; or name rows that have a label with --data FILE"
        )
    if options.kind == SFT and not options.all and options.min_reward is None and not options.session:
        raise ConfigurationError(
            "say which sessions are worth imitating: --min-reward X, --session ID (several times for several), or"
            " --all for every session that the other filters leave; or name rows of a file with --data FILE"
        )


def _is_default(value: Any) -> bool:
    return value is None or value is False


def overrides_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that take precedence over file and environment."""
    overrides: dict[str, Any] = {}
    for assignment in options.set:
        overrides = merge(overrides, parse_assignment(assignment))
    given = {"run": options.run, "proxy_url": options.proxy}
    return {**overrides, **{key: value for key, value in given.items() if value is not None}}


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no date such as 2026-01-31 or 2026-01-31T12:00") from error
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


_ABOUT = """\
Fits the run's newest weights to what somebody chose, in one process beside the proxy.

  base-rl fit sft --min-reward 0.9           imitate the sessions that went well
  base-rl fit sft --data chats.jsonl         imitate the conversations of a file
  base-rl fit dpo --epochs 2                 follow the preferences that were posted
  base-rl fit kto --threshold 0.5            make good sessions likelier and others less likely
  base-rl fit reward-model --output judge/   learn to score answers from preferences

Beside a base-rl on this machine, address, key and weights are those of its data directory (--data-dir, default
.base-rl). Elsewhere name the proxy with --proxy and give a trainer key of the run in BASE_RL_TRAINER__API_KEY.
`python -m trainer fit` is the same without looking for a data directory.

sft, dpo and kto make the run's next version, which is served and listed like any other. Stop or pause the run's
trainer meanwhile: where it makes a version first, nothing is made here. --dry-run says what would be learnt from;
every step is logged, and told to the sinks of [trainer.metrics]. Ctrl-C ends it and leaves nothing half done.
"""

_SFT = "Imitates sessions: raises the log-probability of their outputs, token by token, as they were recorded."
_DPO = (
    "Follows preferences: widens the margin of what was chosen over what was rejected (DPO), from the newest weights."
)
_KTO = "Makes desirable sessions likelier and undesirable ones less likely, without pairs (KTO)."
_REWARD = "Learns to score answers from preferences, into a directory that AutoModelForSequenceClassification reads."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="base-rl fit", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="sft|dpo|kto|reward-model")
    sft = kinds.add_parser(SFT, help=_SFT, description=_SFT)
    dpo = kinds.add_parser(DPO, help=_DPO, description=_DPO)
    kto = kinds.add_parser(KTO, help=_KTO, description=_KTO)
    reward = kinds.add_parser(REWARD_MODEL, help=_REWARD, description=_REWARD)
    sft.add_argument("--min-reward", type=float, metavar="X", help="sessions with at least this reward")
    sft.add_argument("--all", action="store_true", help="every session that the other filters leave")
    kto.add_argument(
        "--threshold", type=float, metavar="X", help="sessions with at least this reward are desirable, others not"
    )
    _selecting_sessions(sft)
    _selecting_sessions(kto)
    for kind in (dpo, reward):
        kind.add_argument("--source", help="preferences of this source, for example ada")
    dpo.add_argument(
        "--loss",
        type=PreferenceForm,
        default=PreferenceForm.SIGMOID,
        choices=list(PreferenceForm),
        metavar="FORM",
        help="sigmoid, sigmoid_norm (per token) or ipo",
    )
    dpo.add_argument("--beta", type=float, default=0.1, help="how much the reference holds; 0.1")
    dpo.add_argument("--label-smoothing", type=float, default=0.0, help="share of labels believed wrong; 0")
    kto.add_argument("--beta", type=float, default=0.1, help="how much the reference holds; 0.1")
    kto.add_argument("--desirable-weight", type=float, default=1.0, help="of the loss of desirable examples; 1")
    kto.add_argument("--undesirable-weight", type=float, default=1.0, help="of the loss of undesirable examples; 1")
    reward.add_argument("--output", type=Path, required=True, metavar="DIR", help="not there yet, or empty")
    for name, kind in ((SFT, sft), (DPO, dpo), (KTO, kto), (REWARD_MODEL, reward)):
        _of_all(kind, name)
    return parser


def _selecting_sessions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", action="append", metavar="ID", help="this session; several times for several")
    parser.add_argument("--task", help="sessions of this task")
    parser.add_argument("--version", type=int, metavar="V", help="sessions with tokens of this policy version")


def _of_all(parser: argparse.ArgumentParser, name: str) -> None:
    add = parser.add_argument
    add("--since", type=_moment, metavar="DATE", help="since then, for example 2026-01-31 or 2026-01-31T12:00, UTC")
    add("--until", type=_moment, metavar="DATE", help="before then")
    add("--from", dest="from_", type=Path, metavar="PATH", help="a folder or file of base-rl export, not the proxy")
    data = f"rows of a .jsonl or .parquet file in their place: {COLUMNS[name]}; several times for several"
    add("--data", action="append", type=Path, metavar="FILE", help=data)
    add("--epochs", type=int, default=1, help="times through what is learnt from; 1")
    add("--batch", type=int, default=32, help="sessions, pairs or rows of an optimiser step; 32")
    add("--learning-rate", type=float, help=f"{RATES[name]:g}; trainer.optimizer has the optimiser's other options")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="share to evaluate on, not learnt from; 0.1")
    add("--config", type=Path, help="the run's TOML file; its [trainer] section is read")
    add("--run", help="name of the run (trainer.run)")
    add("--proxy", metavar="URL", help="address of the proxy (trainer.proxy_url)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any option of [trainer], as for training")
    add("--dry-run", action="store_true", help="say what would be learnt from, and change nothing")
    add("--json", action="store_true", help="print the outcome as JSON")
