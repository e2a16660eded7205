"""The trainer's commands.

- `python -m trainer --config FILE …` trains runs (`trainer/train/command.py`).
- `python -m trainer fit sft|dpo|reward-model …` fits to chosen sessions or to preferences (`trainer/fit/command.py`).
- `python -m trainer replay RUN VERSION …` makes a past step again (`trainer/replay/command.py`).
- `python -m trainer plan --model NAME …` prints the memory that training needs (`trainer/planning/command.py`).
- `python -m trainer presets` prints how far apart the gradients of the presets are (`trainer/distances_command.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from proxy.contract.extras import missing_packages

_WRONG_CONFIGURATION = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Each is imported when it is chosen, since some import torch."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if reason := missing_packages("train"):
        sys.stderr.write(f"{reason}\n")
        return _WRONG_CONFIGURATION
    if words[:1] == ["replay"]:
        from trainer.replay.command import main as replay

        return replay(words[1:])
    if words[:1] == ["fit"]:
        from trainer.fit.command import main as fit

        return fit(words[1:])
    if words[:1] == ["plan"]:
        from trainer.planning.command import main as plan

        return plan(words[1:])
    if words[:1] == ["presets"]:
        from trainer.distances_command import main as presets

        return presets(words[1:])
    from trainer.train.command import main as train

    return train(words)


if __name__ == "__main__":
    status = main()
    # All clean-up is done by now. A normal exit would take seconds with torch imported, and a metrics library whose
    # server hangs could block it for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
