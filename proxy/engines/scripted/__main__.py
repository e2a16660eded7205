"""`python -m proxy.engines.scripted`: answer by the rules of a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from proxy.engines.common.process import add_address, prepare, serve

DESCRIPTION = """\
Answers by the rules of a script over SGLang's native HTTP API, in the tokens of a real tokenizer. No model runs: it
is for checking an agent's wiring, for tests and for benchmarks. docs/scripted-engine.md describes scripts.

  python -m proxy.engines.scripted --script my.toml --port 30000
  curl 127.0.0.1:30000/generate -d '{"input_ids": [72, 105]}'
"""

WRONG_CONFIGURATION = 2
"""Exit status for a fault that no restart repairs; the last line of standard error names it."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from proxy.engines.scripted.script import BUILT_IN, MODEL

    parser = argparse.ArgumentParser(
        prog="python -m proxy.engines.scripted",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        default=str(MODEL),
        metavar="DIR",
        help="directory or Hugging Face id whose tokenizer and chat template are used; its weights are not read "
        "(default: a small tokenizer of base-rl's own)",
    )
    add("--script", type=Path, default=BUILT_IN, metavar="FILE", help="TOML or JSON (default: one that echoes)")
    add_address(parser)
    add("--weight-version", default="default", metavar="LABEL", help="name of the weights that it claims to have")
    add(
        "--ignore-adapters",
        action="store_true",
        help="accept LoRA adapters by name and serve the base model for all of them, as a broken engine does",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Imported after the arguments are parsed: tokenizers take a second, and --help should not.
    from proxy.engines.scripted.script import read_script
    from proxy.engines.scripted.server import ScriptedEngine
    from proxy.settings import ConfigurationError
    from proxy.tokens.template import ChatTemplate

    prepare()
    try:
        script = read_script(options.script)
        app = ScriptedEngine(
            ChatTemplate.load(options.model),
            script,
            model=options.model,
            weight_label=options.weight_version,
            ignore_adapters=options.ignore_adapters,
        )
    except ConfigurationError as error:
        sys.stderr.write(f"base-rl: {error}\n")
        return WRONG_CONFIGURATION
    serve(app, host=options.host, port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
