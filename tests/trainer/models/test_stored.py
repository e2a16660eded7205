"""Parts of stored tensors are those of the whole tensors, and damaged files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainer.errors import WeightsUnusable
from trainer.models import stored as stored_tensors
from trainer.models.stored import StoredTensors

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_part_is_that_of_the_whole_tensor(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("stored")
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    whole = (torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 251).to(
        data.draw(st.sampled_from(_DTYPES))
    )
    save_file({"other": torch.zeros(3), "it": whole}, directory / "model.safetensors")
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - first)) for size, first in zip(shape, offsets, strict=True)]
    part = torch.full(sizes, 9.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_tensors, "_BLOCK", data.draw(st.sampled_from([1, 16, 1 << 20])))
        StoredTensors(directory).read_into("it", part, offsets)
    wanted = whole[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
    assert torch.equal(part, wanted.float())


def test_tensors_of_several_files_are_found(tmp_path: Path) -> None:
    save_file({"one": torch.ones(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"two": torch.ones(4)}, tmp_path / "model-2.safetensors")
    assert StoredTensors(tmp_path).shapes == {"one": (2, 3), "two": (4,)}


@pytest.mark.parametrize("target", [torch.empty(3), torch.empty(1, 4), torch.empty(3, 3)])
def test_a_part_that_the_tensor_does_not_have_is_refused(tmp_path: Path, target: torch.Tensor) -> None:
    save_file({"it": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"it of shape \(2, 3\) has no part"):
        StoredTensors(tmp_path).read_into("it", target)


@pytest.mark.parametrize("left", [0, 4, 40, 90])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, left: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"it": torch.ones(8)}, file)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(WeightsUnusable, match=r"model\.safetensors"):
        StoredTensors(tmp_path)


def test_a_file_that_shrank_since_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"it": torch.ones(8)}, file)
    found = StoredTensors(tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightsUnusable, match="ended early"):
        found.read_into("it", torch.empty(8))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnusable, match="no safetensors"):
        StoredTensors(tmp_path)
