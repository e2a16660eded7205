"""`python -m proxy.engines.embedded`: serves one model on a CPU or one GPU."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import threading
from collections.abc import Sequence

DESCRIPTION = """\
Serves a Hugging Face causal language model over SGLang's native HTTP API: /generate with exact token ids and
log-probabilities, weights replaced between two decode steps while requests go on. It is for machines without SGLang
and for small models; it keeps no prefix cache and answers token ids, not text. Answers can be held to a JSON schema,
a regular expression or a grammar.

  python -m proxy.engines.embedded --model ./my-model --port 30000
  curl 127.0.0.1:30000/generate -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}'
"""

SWITCH_INTERVAL = 0.0005
"""Seconds. The model thread takes the interpreter back this soon from the HTTP side; the default, 5 ms, is longer
than a decode step of a small model."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m proxy.engines.embedded",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="directory or Hugging Face id of the model")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=30000, help="port to listen on (default %(default)s)")
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
    add("--weight-version", default="default", metavar="LABEL", help="name of the weights loaded at the start")
    add("--seed", type=int, default=None, help="seed of the sampler; without it every start draws differently")
    options = parser.parse_args(arguments)
    for name in ("threads", "max_running", "max_total_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # After the arguments: importing torch takes seconds, and --help should not.
    import torch
    import uvicorn

    from proxy.engines.compiled_grammars import STACK_BYTES
    from proxy.engines.embedded.model import ModelUnsupported, ServedModel
    from proxy.engines.embedded.server import create_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    threading.stack_size(STACK_BYTES)
    torch.set_num_threads(options.threads)
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
    )
    # What is loaded by now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL)
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
