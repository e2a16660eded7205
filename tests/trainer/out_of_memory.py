"""`python -m tests.trainer.out_of_memory ARGUMENTS…`: run the trainer; its second rank runs out of memory in forward
passes of more than MOST_TOKENS tokens."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from trainer.__main__ import main
from trainer.models.huggingface import PolicyModel


def install(most: int) -> None:
    forward = PolicyModel.forward

    def bounded(self: PolicyModel, input_ids_BT: torch.Tensor, *others: Any) -> Any:
        if isinstance(self, FSDPModule) and input_ids_BT.numel() > most:  # except while it is tested at the start
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nand much more about it")
        return forward(self, input_ids_BT, *others)

    setattr(PolicyModel, "forward", bounded)  # noqa: B010 - of this process alone


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        install(int(os.environ["MOST_TOKENS"]))
    sys.exit(main())
