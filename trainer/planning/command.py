"""`python -m trainer plan --model NAME --gpus N …`: the memory that a trainer needs, before anything is loaded.

The exit status is 0 if it fits, 1 if it does not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from proxy.contract.visible import visible
from trainer.config import Precision
from trainer.errors import ConfigurationError, UnsupportedModel
from trainer.parallel.layout import Layout
from trainer.planning.memory import USABLE, RankMemory, Work, parameters, rank_memory
from trainer.planning.proposals import Proposal, fits, propose
from trainer.planning.shapes import shape_of

GIB = 1 << 30
_MEANINGS = {
    "weights": "weights, float32",
    "gradients": "gradients, float32",
    "optimizer": "AdamW's moments, float32",
    "reference": "the reference's weights",
    "gathered": "gathered for a moment",
    "casts": "weights in bfloat16",
    "activations": "activations",
    "logits": "a chunk of logits",
}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        config = shape_of(options.model)
        layout = Layout.parse(options.layout or f"d{options.gpus}")
        layout.check_world(options.gpus)
        device_bytes = round(options.memory * GIB)
        work = Work(
            tokens=options.tokens,
            precision=Precision(options.precision),
            checkpointing=options.checkpointing,
            compiled=options.compile,
            reference=options.reference,
            on_gpu=options.device == "cuda",
        )
        lines = [f"{options.model}: {parameters(config) / 1e9:.2f} billion parameters"]
        try:
            layout.check_model(config.shape)
        except ConfigurationError as error:
            lines.append(f"cannot be divided: {error}")
        else:
            memory = rank_memory(config, layout, work)
            lines += _table(memory)
            verdict = f"{gib(memory.total)} of the {gib(round(USABLE * device_bytes))} GiB to plan with"
            if fits(memory, device_bytes):
                lines.append(f"fits on {options.gpus} × {options.memory:g} GiB as {layout}: {verdict}")
                _print(lines)
                return 0
            lines.append(f"does not fit on {options.gpus} × {options.memory:g} GiB as {layout}: {verdict}")
        lines.append(described(propose(config, options.gpus, work, device_bytes), options.gpus))
    except (ConfigurationError, UnsupportedModel) as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return 2
    _print(lines)
    return 1


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def described(proposal: Proposal | None, asked: int) -> str:
    """Return a proposal as the settings to write."""
    if proposal is None:
        return "no layout fits: train an adapter, or use devices with more memory"
    work, number = proposal.work, "" if proposal.gpus == asked else f"{proposal.gpus} GPUs, "
    more = ", activation_checkpointing = true" if work.checkpointing else ""
    return (
        f'what fits: {number}layout = "{proposal.layout}", batch.max_tokens_per_microbatch = {work.tokens}{more}'
        f" ({gib(proposal.memory.total)} GiB)"
    )


def _table(memory: RankMemory) -> list[str]:
    rows = [(_MEANINGS[field.name], getattr(memory, field.name)) for field in fields(memory)]
    lines = [f"  {meaning:<36}{gib(size):>8} GiB" for meaning, size in rows if size]
    return [*lines, f"  {'most on one rank':<36}{gib(memory.total):>8} GiB"]


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _gib(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no size in GiB")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="base-rl plan",
        description="Print the memory that training a model needs on each rank, and what would fit if it does not.",
    )
    parser.add_argument("--model", required=True, help="directory or Hugging Face id; only its config.json is read")
    parser.add_argument("--gpus", type=_positive, default=1, help="devices, one for each process; default: 1")
    parser.add_argument("--memory", type=_gib, default=80.0, help="memory of one device in GiB; default: 80")
    parser.add_argument("--layout", help="how the processes divide the model, as d4t2; default: d and all of them")
    parser.add_argument("--tokens", type=_positive, default=16384, help="batch.max_tokens_per_microbatch")
    parser.add_argument("--precision", choices=[each.value for each in Precision], default="bfloat16")
    parser.add_argument("--checkpointing", action="store_true", help="activation_checkpointing = true")
    parser.add_argument("--compile", action="store_true", help="compile = true")
    parser.add_argument("--reference", action="store_true", help="with a reference model (kl_coefficient)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser
