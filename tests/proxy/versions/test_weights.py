"""Checks of published weights: errors name the fault, and good weights of every kind pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.errors import StorageUnavailable, WeightsMissing, WeightsRejected
from proxy.versions.inspector import WeightsInspector
from proxy.versions.safetensors import read_header, scan
from tests.proxy.versions.publishing import publish, random_numbers, reference

Arrays = dict[str, Any]

LAYER = "model.layers.0.self_attn.q_proj.weight"
ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def base_tensors() -> Arrays:
    return {
        "model.embed_tokens.weight": random_numbers(8, 4),
        LAYER: random_numbers(4, 4),
        "model.layers.1.self_attn.q_proj.weight": random_numbers(4, 4),
        "model.norm.weight": random_numbers(4),
        "lm_head.weight": random_numbers(8, 4),
    }


class Place:
    """A storage root, and a base model beside it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "weights"
        self.base = directory / "base"
        self.base.mkdir()
        self.inspector = WeightsInspector(self.root)
        self.configure()

    def configure(self, tensors: Arrays | None = None, **config: Any) -> None:
        save_file(tensors or base_tensors(), self.base / "model.safetensors")
        (self.base / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))

    def publish(self, tensors: Arrays | None = None, **options: Any) -> WeightsReference:
        return publish(self.root / "run_1", base_tensors() if tensors is None else tensors, **options)

    def adapter(self, tensors: Arrays | None = None, **config: Any) -> WeightsReference:
        made = {f"{ADAPTER}A.weight": random_numbers(2, 4), f"{ADAPTER}B.weight": random_numbers(4, 2)}
        return publish(self.root / "run_1", {**made, **(tensors or {})}, WeightsFormat.ADAPTER, config)

    async def check(self, weights: WeightsReference) -> None:
        await self.inspector.check(weights, str(self.base))

    async def reason(self, weights: WeightsReference) -> str:
        with pytest.raises(WeightsRejected) as rejected:
            await self.check(weights)
        return rejected.value.message


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def without(tensors: Arrays, name: str) -> Arrays:
    return {each: tensor for each, tensor in tensors.items() if each != name}


async def test_good_weights_pass(place: Place) -> None:
    await place.check(place.publish())
    await place.check(place.adapter())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda made: without(made, LAYER), f"tensors of the base model are missing: {LAYER}"),
        (lambda made: {**made, LAYER: random_numbers(4, 5)}, "has the shape [4, 5] and the base model's has [4, 4]"),
        (lambda made: {f"renamed.{name}": each for name, each in made.items()}, "base model has no tensors called"),
        (lambda made: {**made, "model.x": random_numbers(1)}, "the base model has no tensors called model.x"),
        (lambda made: {**made, LAYER: np.ones((4, 4), np.int32)}, f"{LAYER} is I32 and the base model's is F32"),
        (lambda made: {**made, LAYER: np.full((4, 4), np.inf, np.float32)}, "not finite"),
        (lambda made: {**made, "model.norm.weight": np.array([1, 2, 3, np.nan], np.float16)}, "not finite"),
    ],
    ids=["a missing layer", "a wrong shape", "renamed", "too many", "integers", "infinite", "NaN"],
)  # fmt: skip
async def test_tensors_that_differ_from_the_bases_are_rejected(
    place: Place, change: Callable[[Arrays], Arrays], reason: str
) -> None:
    assert reason in await place.reason(place.publish(change(base_tensors())))


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({f"{ADAPTER}B.weight": random_numbers(5, 2)}, {}, "is for [5, 4], and the base model has [4, 4]"),
        ({f"{ADAPTER}A.weight": random_numbers(3, 4)}, {}, "not of rank 2"),
        ({f"{ADAPTER}A.weight": random_numbers(2, 4, 1)}, {}, "not a weight of a low-rank adapter"),
        ({"other.weight": random_numbers(2)}, {}, "not a weight of a low-rank adapter"),
        (
            {ADAPTER.replace("q_proj", "k_proj") + "A.weight": random_numbers(2, 4)},
            {},
            "k_proj is missing",
        ),
        ({}, {"target_modules": ["k_proj"]}, "not one of the adapter's target_modules"),
        ({}, {"r": 0}, "has the rank 0"),
        ({}, {"lora_alpha": -1}, "has the lora_alpha -1"),
        ({}, {"use_rslora": True}, "this one has use_rslora = True"),
        ({}, {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({f"{ADAPTER}B.weight": np.full((4, 2), np.nan, np.float32)}, {}, "not finite"),
    ],
)
async def test_adapters_that_do_not_fit_are_rejected(
    place: Place, tensors: Arrays, config: Mapping[str, Any], reason: str
) -> None:
    assert reason in await place.reason(place.adapter(tensors, **config))


async def test_an_adapter_of_another_base_model_is_rejected(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    await place.check(place.adapter(base_model_name_or_path=str(place.base)))
    await place.check(place.adapter(base_model_name_or_path="hub/of-the-same-model"))
    assert "is an adapter of" in await place.reason(place.adapter(base_model_name_or_path=str(other)))


async def test_an_adapter_of_a_layer_that_the_base_has_not_is_rejected(place: Place) -> None:
    other = ADAPTER.replace("layers.0", "layers.9")
    made = {f"{other}A.weight": random_numbers(2, 4), f"{other}B.weight": random_numbers(4, 2)}
    assert "the base model has no such layer" in await place.reason(place.adapter(made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
async def test_weights_may_be_of_another_float_than_the_base(place: Place, dtype: torch.dtype) -> None:
    weights = place.publish()
    tensors = {name: torch.from_numpy(each).to(dtype) for name, each in base_tensors().items()}
    save_torch_file(tensors, Path(weights.uri) / "model.safetensors")
    await place.check(reference(Path(weights.uri)))


@pytest.mark.parametrize("in_version", [True, False])
@pytest.mark.parametrize("in_base", [True, False])
async def test_a_tied_head_may_be_in_the_files_or_not(place: Place, in_base: bool, in_version: bool) -> None:
    tensors = base_tensors()
    headless = without(tensors, "lm_head.weight")
    place.configure(tensors if in_base else headless, tie_word_embeddings=True)
    await place.check(place.publish(tensors if in_version else headless))


async def test_parts_of_the_base_that_models_do_not_have_may_be_missing(place: Place) -> None:
    more = {"model.layers.2.mlp.weight": random_numbers(2), "mtp.fc.weight": random_numbers(2)}
    place.configure({**base_tensors(), **more, "model.layers.0.self_attn.rotary_emb.inv_freq": random_numbers(2)})
    await place.check(place.publish())


async def test_a_base_missing_from_this_machine_is_not_compared(place: Place) -> None:
    await place.inspector.check(place.publish({"anything": random_numbers(2)}), "somebody/remote-model")


async def test_weights_in_several_files_are_one_version(place: Place) -> None:
    directory = Path(place.publish().uri)
    (directory / "model.safetensors").unlink()
    tensors = base_tensors()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    await place.check(reference(directory))
    old = msgspec.structs.replace(reference(directory), files={})
    await place.check(old)
    assert "SHA-256 differs" in await place.reason(msgspec.structs.replace(old, sha256="0" * 64))
    index["weight_map"][names[0]] = "b.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"is wrong about {names[0]}" in await place.reason(reference(directory))
    save_file(tensors, directory / "b.safetensors")
    assert "and in another file" in await place.reason(reference(directory))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-5], "bytes, not"),
        (lambda content: content[:-5] + b"12345", "SHA-256 differs"),
        (lambda content: content[:4], "bytes, not"),
    ],
)
async def test_files_that_changed_after_their_commit_are_rejected(
    place: Place, damage: Callable[[bytes], bytes], reason: str
) -> None:
    weights = place.publish()
    await place.check(weights)
    file = Path(weights.uri) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert reason in await place.reason(weights)


@pytest.mark.parametrize("length", [0, 7, 8, 40, 200])
async def test_a_truncated_file_is_rejected_even_with_a_matching_checksum(place: Place, length: int) -> None:
    file = Path(place.publish().uri) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert await place.reason(reference(file.parent))


@pytest.mark.parametrize("name", ["config.json", "extra.bin", "deep/extra.py"])
async def test_every_other_file_has_its_checksum_too(place: Place, name: str) -> None:
    weights = place.publish()
    file = Path(weights.uri) / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("changed")
    assert name in await place.reason(weights)


async def test_the_trainers_own_files_are_not_the_proxys(place: Place) -> None:
    directory = Path(place.publish().uri)
    (directory / "trainer_state").mkdir()
    (directory / "trainer_state" / "state.json").write_text("{}")
    weights = reference(directory)
    (directory / ".uncommitted").touch()
    await place.check(weights)
    (directory / "trainer_state" / "state.json").unlink()
    await place.check(weights)


async def test_a_version_lies_inside_the_storage(place: Place, tmp_path: Path) -> None:
    elsewhere = publish(tmp_path / "elsewhere", base_tensors())
    link = place.root / "link"
    place.publish()
    link.symlink_to(elsewhere.uri)
    around = place.root / ".." / "elsewhere" / Path(elsewhere.uri).name
    for uri in (elsewhere.uri, str(link), str(around), str(place.root)):
        reason = await place.reason(msgspec.structs.replace(elsewhere, uri=uri))
        assert f"is outside the directory for weights, {place.root}" in reason
    weights = place.publish()
    (Path(weights.uri) / "config.json").unlink()
    (Path(weights.uri) / "config.json").symlink_to(Path(elsewhere.uri) / "config.json")
    assert "config.json is not a regular file" in await place.reason(weights)


async def test_a_missing_version_is_distinguished_from_a_missing_storage(place: Place) -> None:
    weights = place.publish()
    moved = Path(weights.uri).rename(place.root / "moved")
    with pytest.raises(WeightsMissing) as missing:
        await place.check(weights)
    assert missing.value.is_storage_there
    place.root.rename(place.root.with_name("unmounted"))
    with pytest.raises(WeightsMissing) as away:
        await place.check(msgspec.structs.replace(weights, uri=str(moved.parent / "run_1" / "v1")))
    assert not away.value.is_storage_there


@pytest.mark.parametrize("uri", ["", "relative", "/a" * 600, "/nul\0/x"])
async def test_odd_paths_are_refused(place: Place, uri: str) -> None:
    assert await place.reason(msgspec.structs.replace(place.publish(), uri=uri))


async def test_a_check_is_shared_and_made_again_once_a_file_changed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(path: Path, *arguments: Any) -> str:
        read.append(path.name)
        return scan(path, *arguments)

    monkeypatch.setattr("proxy.versions.weights.scan", counted)
    weights = place.publish()
    for _ in range(2):
        await place.check(weights)
    assert read == ["model.safetensors"]
    file = Path(weights.uri) / "model.safetensors"
    file.write_bytes(file.read_bytes())  # the same, and that is known only after reading it
    await place.check(weights)
    assert len(read) == 2


async def test_a_check_ends_when_the_proxy_stops(place: Place) -> None:
    weights = place.publish()
    # Set directly: `aclose` would also end the thread in which this check must notice that it should stop.
    place.inspector._stopping.set()
    with pytest.raises(StorageUnavailable, match="stopping"):
        await place.check(weights)
    await place.inspector.aclose()


FLOATS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.float8_e4m3fn,
    torch.float8_e5m2: torch.float8_e5m2,
}


@given(
    st.sampled_from(list(FLOATS)),
    st.lists(st.floats(-400, 400), min_size=1, max_size=20),
    st.sampled_from([None, "nan", "inf", "-inf"]),
    st.data(),
)
def test_numbers_that_are_not_finite_are_found_in_every_dtype(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    values: list[float],
    odd: str | None,
    data: st.DataObject,
) -> None:
    if odd is not None:
        values[data.draw(st.integers(0, len(values) - 1))] = float(odd)
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    path = tmp_path_factory.mktemp("numbers") / "model.safetensors"
    save_torch_file({"x": tensor, "counts": torch.tensor([-1, 2**60])}, path)
    header = read_header(path)
    if bool(tensor.to(torch.float64).isfinite().all()):
        assert len(scan(path, header, lambda: False)) == 64
    else:
        with pytest.raises(WeightsRejected, match=r"x in model\.safetensors has values that are not finite"):
            scan(path, header, lambda: False)


@given(st.binary(max_size=200))
def test_no_file_is_odd_enough_for_another_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("odd") / "model.safetensors"
    for written in (content, len(content).to_bytes(8, "little") + content):
        path.write_bytes(written)
        try:
            read_header(path)
        except WeightsRejected:
            continue


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.sampled_from(["F32", "dtype", "shape", "data_offsets"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
        ),
        max_leaves=10,
    )
)
def test_no_header_is_odd_enough_for_another_error(tmp_path_factory: pytest.TempPathFactory, header: Any) -> None:
    path = tmp_path_factory.mktemp("odd") / "model.safetensors"
    text = json.dumps({"x": header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        read_header(path)
    except WeightsRejected:
        return
