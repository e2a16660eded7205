"""`send_tensors.py URL MODEL LABEL`, run by SGLang's own interpreter: load a model's tensors into a server's
memory."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path


def post(url: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()


def main() -> None:
    import torch.multiprocessing
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer  # type: ignore[import-not-found]

    # The default strategy passes file descriptors, which an unrelated process cannot receive.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    url, model, label = sys.argv[1:]
    tensors = list(load_file(Path(model) / "model.safetensors").items())
    blob = MultiprocessingSerializer.serialize(tensors, output_str=True)
    post(f"{url}/begin_weight_update", {})
    post(f"{url}/update_weights_from_tensor", {"serialized_named_tensors": [blob], "weight_version": label})
    post(f"{url}/end_weight_update", {})


if __name__ == "__main__":
    main()
