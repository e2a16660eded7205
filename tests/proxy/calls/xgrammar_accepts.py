"""Run by SGLang's own interpreter, which has XGrammar: read [[structural tag, [text, …]], …] and write, for every
tag, which of its texts XGrammar accepts as a complete answer."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from xgrammar import Grammar  # type: ignore[import-not-found]
    from xgrammar.testing import _is_grammar_accept_string as accepts  # type: ignore[import-not-found]

    verdicts = []
    for tag, texts in json.load(sys.stdin):
        grammar = Grammar.from_structural_tag(tag)
        verdicts.append([bool(accepts(grammar, text)) for text in texts])
    json.dump(verdicts, sys.stdout)


if __name__ == "__main__":
    main()
