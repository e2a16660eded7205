"""Lets the torchvision wheel, which is built beside a CUDA torch, import beside a CPU one.

Python imports this module by itself when its folder is on PYTHONPATH. torchvision registers fake implementations for
two operators that its native library would define; without a CUDA torch that library does not load, so the operators
are defined here, just before torchvision is first imported. They can be named, not called.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec


class DefineTorchvisionOperators:
    """A finder that finds nothing: it runs once, when torchvision is looked for."""

    library: object = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        # torch forgets the definitions when the library object is collected.
        DefineTorchvisionOperators.library = library
        return None


sys.meta_path.insert(0, DefineTorchvisionOperators())  # type: ignore[arg-type]
