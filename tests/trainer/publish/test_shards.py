"""Files of weights: those of safetensors, in shards and precisions that engines and the proxy read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from proxy.engines.embedded.weights import read_directory
from proxy.versions.weights import check_content, check_files, check_headers, read_base
from tests.trainer.publish.test_disk import World
from tests.trainer.tiny import load_tiny
from trainer.models.state_dict import gather_weights
from trainer.publish.shards import write_shards

SHARD = 4000


def test_one_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "model.b": torch.arange(12.0).reshape(3, 4),
        "model.a": torch.ones(5, dtype=torch.bfloat16),
        "model.ü": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "wanted", metadata={"format": "pt"})
    sums = write_shards(tensors, tmp_path, 1 << 30)
    written = (tmp_path / "model.safetensors").read_bytes()
    assert written == (tmp_path / "wanted").read_bytes()
    assert sums == {"model.safetensors": hashlib.sha256(written).hexdigest()}


def test_shards_in_bfloat16_pass_the_proxys_checks_and_are_read_whole(tiny_model: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "weights", tiny_model)
    publisher = world.new_publisher(dtype="bfloat16")
    tensors = gather_weights(world.model.named_weights(), keep=True, dtype=publisher.dtype)
    # 1 MB is the least that the setting allows, and the model of the tests is smaller.
    publisher.shard_bytes = SHARD
    staged = publisher.stage(world.head, tensors, None)
    publisher.settle(staged)
    directory = Path(staged.weights.uri)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 2 * max(SHARD, tensors["model.embed_tokens.weight"].nbytes) for file in files)
    check_files(staged.weights, directory)
    headers = check_headers(staged.weights, directory, read_base(tiny_model))
    check_content(staged.weights, directory, headers, lambda: False)
    for name, tensor in read_directory(str(directory)).items():
        assert torch.equal(tensor, tensors[name])
    world.commit(staged)
    other = load_tiny(tiny_model)
    assert publisher.restore(world.head, other) is None
    for name, parameter in other.named_weights():
        assert torch.equal(parameter, tensors[name].float())
