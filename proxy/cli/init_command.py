"""`base-rl init`: make a folder for somebody's own agent, from one of the examples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.console import Refused, finish, out


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    example: Annotated[str | None, typer.Option(help="Example to begin with.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; default: the folder's.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to train: a directory, a Hugging Face id, or `tiny` for the example's.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take the defaults.")] = False,
) -> None:
    """Make a folder with an agent, tasks, a reward and a configuration, which run at once.

    It asks which example is most like your agent, for the name of the run, and for the model. Then change `agent.py`,
    `tasks.jsonl` and `reward.py` into yours, one at a time.
    """

    def run_it() -> int:
        from proxy.cli.starting_folder import TINY, examples, make_folder, valid_name

        known = examples()
        asks = not yes and sys.stdin.isatty()
        chosen = example
        if chosen is None and asks:
            for name, summary in known.items():
                out.print(f"  {name:<12} {summary}")
            chosen = typer.prompt("Which example is most like your agent?", default=next(iter(known)))
        name = run or valid_name(folder.resolve().name)
        if run is None and asks:
            name = typer.prompt("What is the run called?", default=name)
        wanted = model
        if wanted is None and asks:
            wanted = typer.prompt("Which model? A directory, a Hugging Face id, or the example's", default=TINY)
        chosen = chosen or next(iter(known))
        if chosen not in known:
            raise Refused(f"there is no example {chosen!r}; there are {', '.join(known)}")
        commands = make_folder(folder, example=chosen, run=name, model=wanted or TINY)
        out.print(f"{folder} is ready. Start base-rl there, and in another terminal the attempts:")
        for command in commands:
            out.print(f"  {command}", soft_wrap=True)
        return 0

    finish(run_it)
