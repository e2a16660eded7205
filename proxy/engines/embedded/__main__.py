"""`python -m proxy.engines.embedded`: serve one model on a CPU or one GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from proxy.contract.importing import importing
from proxy.engines.common.process import add_address, prepare, serve

DESCRIPTION = """\
Serves a Hugging Face causal language model over SGLang's native HTTP API: /generate with exact token ids and
log-probabilities, weights replaced between two decode steps while requests continue, many LoRA adapters beside one
base model. It is for machines without SGLang and for small models; it has no prefix cache and answers with token ids,
not text. Answers can be constrained by a JSON schema, a regular expression or a grammar.

  python -m proxy.engines.embedded --model ./my-model --port 30000
  curl 127.0.0.1:30000/generate -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}'
"""

# Seconds after which the model thread takes the interpreter back from the HTTP side; Python's default, 5 ms, is
# longer than a decode step of a small model.
_SWITCH_INTERVAL = 0.0005


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m proxy.engines.embedded",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="directory or Hugging Face id of the model")
    add_address(parser)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs (default %(default)s)")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="weights and activations; log-probabilities are always float32 (default %(default)s)",
    )
    add("--threads", type=int, default=1, help="CPU threads of one operation; 1 is best for tiny models (default 1)")
    add("--max-running", type=int, default=128, help="requests in one batch; more wait (default %(default)s)")
    add(
        "--max-total-tokens",
        type=int,
        default=65536,
        help="bound of the cache in requests × longest one; past it the newest requests step back and are "
        "recomputed later (default %(default)s)",
    )
    add(
        "--max-loaded-loras",
        type=int,
        default=16,
        help="LoRA adapters in memory; the least recently used one makes room for another, and is read again when a "
        "request names it; 0 takes none (default %(default)s)",
    )
    add("--max-lora-rank", type=int, default=64, help="highest rank of an adapter (default %(default)s)")
    add("--weight-version", default="default", metavar="LABEL", help="name of the weights loaded at the start")
    add("--seed", type=int, default=None, help="seed of the sampler; without it every start draws differently")
    options = parser.parse_args(arguments)
    for name in ("threads", "max_running", "max_total_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if options.max_loaded_loras < 0 or options.max_lora_rank < 1:
        parser.error("--max-loaded-loras must be 0 or more, and --max-lora-rank 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Imported after the arguments are parsed: torch takes seconds, and --help should not.
    with importing():
        import torch

        from proxy.engines.embedded.model import ModelUnsupported, ServedModel
        from proxy.engines.embedded.residency import AdapterLimits
        from proxy.engines.embedded.server import create_app

    prepare()
    torch.set_num_threads(options.threads)
    # Arithmetic with denormal numbers is many times slower on CPUs, and their values do not matter here.
    torch.set_flush_denormal(True)
    seed = options.seed if options.seed is not None else torch.seed() % 2**63
    try:
        model = ServedModel(
            options.model,
            device=options.device,
            dtype=options.dtype,
            seed=seed,
            max_total_tokens=options.max_total_tokens,
        )
    except (OSError, ValueError, ModelUnsupported) as error:
        sys.stderr.write(f"cannot serve {options.model}: {error}\n")
        return 1
    app = create_app(
        model,
        weight_label=options.weight_version,
        max_running=options.max_running,
        max_total_tokens=options.max_total_tokens,
        adapters=AdapterLimits(loaded=options.max_loaded_loras, rank=options.max_lora_rank),
    )
    sys.setswitchinterval(_SWITCH_INTERVAL)
    serve(app, host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
