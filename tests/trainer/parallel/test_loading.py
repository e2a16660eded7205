"""No rank of a divided model has the whole model in memory, neither to load nor to publish it (`make test-ranks`)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import all_gather_object

from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.steps import settings_of
from tests.trainer.models.archon.together import together
from trainer.config import TrainerSettings
from trainer.loading import load_learnt
from trainer.models.divided import DividedWeights
from trainer.models.state_dict import read_weights
from trainer.models.stored import weight_files
from trainer.parallel.layout import layout_of
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import local_part
from trainer.publish.shards import write_divided

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

_WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
_SPARSE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "mlp_only_layers": [],
    "num_experts": 8,
    "moe_intermediate_size": 512,
    "vocab_size": 4096,
}
_BUCKET = 32 << 20
"""Bytes of one block of a file with its copy in float32, and what torch and the allocator hold besides tensors."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 165 MB in float32: much more than everything else that a rank allocates."""
    directory = tmp_path_factory.mktemp("wide")
    save_random(directory, "qwen3", **_WIDE)
    return directory


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about the same size, mostly experts."""
    directory = tmp_path_factory.mktemp("sparse")
    save_random(directory, "qwen3_moe", **_SPARSE)
    return directory


def peak_of_loading(
    ranks: Ranks, directory: Path, settings: TrainerSettings, target: Path | None = None
) -> list[tuple[int, int]]:
    """Return for each rank the bytes of its weights, and by how many bytes its resident memory rose at most while it
    loaded them, and wrote them to `target` if there is one."""
    ranks = ranks.arranged(layout_of(settings))
    import peft  # noqa: F401 - the code of a library is no part of the model

    _return_freed_memory()
    # Writing 5 sets the recorded peak to the present size (proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes("VmRSS")
    model: Any = load_learnt(directory, settings, ranks)
    if target is not None:
        write_divided(DividedWeights(model.named_weights(), ranks, None), target, 1 << 40, ranks)
    grown = _kilobytes("VmHWM") - before
    base = model.adapters.model if settings.adapter is not None else model
    own = sum(local_part(weight.detach()).nbytes for weight in base.parameters())
    found: list[Any] = [None] * ranks.size
    all_gather_object(found, (own, grown * 1024))
    return found


def _return_freed_memory() -> None:
    """Let the C library give freed memory back at once, so that the resident memory is what is in use."""
    library = ctypes.CDLL(None)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        assert library.mallopt(option, 1 << 16)


def _kilobytes(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"backend": "fsdp"}),
        pytest.param(4, {"backend": "fsdp"}, marks=pytest.mark.exhaustive),
        (2, {"backend": "fsdp", "adapter": {"rank": 4}}),
        pytest.param(2, {"layout": "d2"}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"layout": "t2"}, marks=pytest.mark.exhaustive),
        (2, {"layout": "p2"}),
        (4, {"layout": "d2t2"}),
        (4, {"layout": "c4"}),
    ],
    ids=lambda each: str(each) if isinstance(each, int) else "-".join(map(str, each.values())),
)
def test_a_rank_loads_only_its_part(wide: Path, size: int, options: dict[str, Any]) -> None:
    assert_only_parts(wide, together(size, peak_of_loading, wide, settings_of(**options)))


@pytest.mark.parametrize(("size", "layout"), [(2, "d2e2"), pytest.param(4, "d2t2e4", marks=pytest.mark.exhaustive)])
def test_a_rank_loads_and_publishes_only_its_experts(sparse: Path, tmp_path: Path, size: int, layout: str) -> None:
    settings = settings_of(layout=layout)
    assert_only_parts(sparse, together(size, peak_of_loading, sparse, settings))
    # The first rank keeps up to four stacks of experts gathered, because the experts' names alternate on the disk.
    weights = read_weights(sparse)
    stack = _SPARSE["num_experts"] * weights["model.layers.0.mlp.experts.0.up_proj.weight"].nbytes
    first, *others = together(size, peak_of_loading, sparse, settings, tmp_path)
    assert_only_parts(sparse, [first], more=4 * stack)
    assert_only_parts(sparse, others)
    assert read_weights(tmp_path).keys() == weights.keys()


def assert_only_parts(directory: Path, found: list[tuple[int, int]], more: int = 0) -> None:
    whole = sum(file.stat().st_size for file in weight_files(directory))
    for own, grown in found:
        assert own < 0.75 * whole
        assert grown <= 1.3 * own + _BUCKET + more, f"{grown / 1e6:.0f} MB for weights of {own / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("size", "options"), [(2, {"backend": "fsdp"}), (4, {"layout": "d2t2"}), (2, {"layout": "p2"})]
)
def test_the_first_rank_publishes_without_the_whole_model(
    wide: Path, tmp_path: Path, size: int, options: dict[str, Any]
) -> None:
    found = together(size, peak_of_loading, wide, settings_of(**options), tmp_path)
    assert read_weights(tmp_path).keys() == read_weights(wide).keys()
    for own, grown in found:
        assert grown <= 1.3 * own + _BUCKET, f"{grown / 1e6:.0f} MB for weights of {own / 1e6:.0f} MB"
