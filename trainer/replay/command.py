"""`python -m trainer replay RUN VERSION [--config FILE] [--proxy URL] [--verify] [--json]`

Makes the step that led to a version again from the record in the proxy's store, and reports whether the same weights
come out. It needs an admin key or the run's trainer key (`trainer.api_key`), must see the weights under the same
paths as the trainer did, and writes only temporary files. It may run beside a trainer.

Exit status: 0; with --verify, 1 if other weights come out; 2 for a wrong configuration; 3 if the step cannot be
replayed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy.contract.replay import StepBatch
from proxy.contract.visible import visible
from trainer.config import load_settings
from trainer.errors import ConfigurationError, ReplayImpossible, TrainerError
from trainer.proxy_client import ProxyClient
from trainer.user_code import UserFunction, functions_in

if TYPE_CHECKING:
    from trainer.replay.verdict import Verdict

DIFFERENT, WRONG, IMPOSSIBLE = 1, 2, 3
_SHOWN = 10


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(options.config, _overrides(options))
        client = ProxyClient(settings.proxy_url, settings.api_key.get_secret_value(), options.run)
        try:
            verdict = _replay(client, options, arguments, functions_in(settings.algorithm))
        finally:
            client.close()
    except ConfigurationError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return WRONG
    except TrainerError as error:
        sys.stderr.write(f"version {options.version} cannot be replayed: {visible(str(error))}\n")
        return IMPOSSIBLE
    if verdict is None:
        return 0
    if options.json:
        sys.stdout.write(f"{visible(msgspec.json.encode(verdict).decode())}\n")
    else:
        sys.stdout.write(f"{visible(describe(options.run, verdict))}\n")
    return DIFFERENT if options.verify and not verdict.identical else 0


def _replay(
    client: ProxyClient,
    options: argparse.Namespace,
    arguments: Sequence[str],
    functions: Mapping[str, UserFunction],
) -> Verdict | None:
    """Replay the step and return the verdict; None on all ranks but the first. Raises TrainerError.

    torch is imported here, because it reads its number of threads when it is imported.
    """
    steps: dict[int, StepBatch] = {}

    def step(version: int) -> StepBatch:
        if version not in steps:
            steps[version] = client.step_batch(version)
        return steps[version]

    inputs = step(options.version).inputs
    alone = "WORLD_SIZE" not in os.environ
    if inputs is not None and inputs.conditions.ranks > 1 and alone:
        return _under_torchrun(inputs.conditions.ranks, arguments)
    if inputs is not None:
        os.environ["OMP_NUM_THREADS"] = str(inputs.conditions.threads)
    import torch

    from trainer.parallel.mesh import join
    from trainer.replay.plan import inputs_of, plan
    from trainer.replay.replaying import Replay

    chain = plan(step, options.version)
    if inputs is not None:
        torch.set_num_threads(inputs.conditions.threads)
    on_gpu = inputs is not None and inputs.conditions.device == "cuda" and torch.cuda.is_available()
    offload = on_gpu and any(inputs_of(step).config.get("offload") for step in chain)
    ranks = join("cuda" if on_gpu else "cpu", offload=offload)
    try:
        verdict = Replay(ranks, functions).run(chain)
    finally:
        ranks.leave()
    if verdict is None or options.result is None:
        return verdict
    options.result.write_bytes(msgspec.json.encode(verdict))
    return None


def _under_torchrun(ranks: int, arguments: Sequence[str]) -> Verdict:
    """Replay the step with as many processes as made it."""
    from trainer.replay.verdict import Verdict

    with tempfile.TemporaryDirectory(prefix="base-rl-replay-") as directory:
        result = Path(directory) / "verdict.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        ended = subprocess.run(
            [*launcher, "-m", "trainer", "replay", *arguments, "--result", str(result)],
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not result.is_file():
            raise ReplayImpossible(
                f"its {ranks} processes ended with status {ended.returncode}; they have said why, above"
            )
        return msgspec.json.decode(result.read_bytes(), type=Verdict)


def describe(run: str, verdict: Verdict) -> str:
    """Describe the verdict for people."""
    lines = [f"version {verdict.version} of {run}: {'identical' if verdict.identical else 'differs'}"]
    lines.append(f"  trajectories    {verdict.trajectories}")
    for name, committed, replayed in (
        ("loss", verdict.committed_loss, verdict.replayed_loss),
        ("gradient norm", verdict.committed_gradient_norm, verdict.replayed_gradient_norm),
    ):
        if committed is not None and replayed is not None:
            lines.append(f"  {name:<15} {committed:.9g} committed, {replayed:.9g} replayed")
    lines.append(
        f"  weights         {verdict.committed_sha256[:16]}… committed, {verdict.replayed_sha256[:16]}… replayed"
    )
    if len(verdict.replayed) > 1:
        earlier = ", ".join(map(str, verdict.replayed[:-1]))
        lines.append(f"  replayed first  {earlier}: the trainer state that this step began with was not kept")
    if not verdict.identical:
        lines += _tensors(verdict)
        lines += [f"  {each.name:<15} {each.then} then, {each.now} now" for each in verdict.conditions] or [
            "  conditions      the same as then, as far as they are recorded"
        ]
    return "\n".join(lines)


def _tensors(verdict: Verdict) -> list[str]:
    if not verdict.compared:
        return ["  tensors         the committed weights are gone: what differs cannot be told"]
    worst = sorted(verdict.tensors, key=lambda each: -each.largest)
    lines = [
        f"  {each.name}: {each.elements} of {each.of} elements, by {each.largest:.3g} at most"
        for each in worst[:_SHOWN]
    ]
    if len(worst) > _SHOWN:
        lines.append(f"  and {len(worst) - _SHOWN} other tensors")
    return lines


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    given = {"run": options.run, "proxy_url": options.proxy}
    return {key: value for key, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer replay", description="Makes a past step again and compares the weights."
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("version", metavar="VERSION", type=int, help="the version that the step made")
    parser.add_argument("--config", type=Path, help="TOML file; its [trainer] section is read")
    parser.add_argument("--proxy", metavar="URL", help="address of the proxy (trainer.proxy_url)")
    parser.add_argument("--verify", action="store_true", help="exit status 1 unless the weights are identical")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser
