"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) over one resident base model, with peft.

The base's weights are frozen. An adapted linear layer computes W x + alpha / rank · B (A x). Only A (rank × in) and
B (out × rank) of one adapter at a time are trained:

```
adapters = load_adapters(directory, settings, ranks, {"one": shape, "other": shape})    # trainer/loading.py
learner = Learner(adapters["one"], …, reference=adapters.base)
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import AdapterSettings, Packing
from trainer.errors import ConfigurationError, WeightsUnusable
from trainer.models.huggingface import PolicyModel
from trainer.models.passes import Passes
from trainer.models.state_dict import ADAPTER_DIRECTORY, adapter_in, load_weights
from trainer.parallel.tensor import like, local_part

_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B")
_SHAPE = ("r", "lora_alpha", "target_modules")


class Adapters:
    """Named adapters over one model, of which at most one is active.

    `adapters[name]` is a policy that is used and trained like a whole model; `base` is the model without an adapter.
    Finish a policy's backward pass before another policy's forward pass, because the model has one active adapter.

    Adapters of one shape share a slot in the model: the tensors of the one in use are there, those of the others are
    set aside. So adapters of a known shape can be added at any time, but a slot only before the model is divided
    among ranks.
    """

    def __init__(self, model: PolicyModel) -> None:
        self.model = model
        self.base = BasePolicy(self)
        self._linear = {name: each for name, each in model.inner.named_modules() if isinstance(each, nn.Linear)}
        self._peft: Any = None
        self._active: str | None = None
        self._policies: dict[str, AdaptedPolicy] = {}
        self._slots: dict[tuple[object, ...], _Slot] = {}

    def __getitem__(self, name: str) -> AdaptedPolicy:
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def add(self, name: str, shape: AdapterSettings, seed: int) -> AdaptedPolicy:
        """Add an adapter that does not change the model yet: B is zero, and A is drawn from the seed.

        Raises ConfigurationError if the model lacks the targets, and ValueError for a name that is taken or cannot be
        part of a module's name, or for a new shape over a model that is divided already.
        """
        if name in self._policies or not name or "." in name or "lora_" in name:
            raise ValueError(f"{name!r} is taken already, or cannot be the name of an adapter")
        key = slot_key(shape)
        if key not in self._slots:
            self._add_slot(name, shape)
            self._slots[key] = _Slot(name)
        policy = self._policies[name] = AdaptedPolicy(self, name, shape, seed, self._slots[key])
        policy.begin_anew()
        return policy

    def remove(self, name: str) -> None:
        """Remove an adapter and free its tensors. Its slot remains for others of the same shape."""
        self._policies.pop(name).vacate()

    def _add_slot(self, name: str, shape: AdapterSettings) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            raise ValueError("slots for adapters are added before the model is divided among ranks")
        from peft import LoraConfig, LoraModel

        config = LoraConfig(
            r=shape.rank,
            lora_alpha=cast("int", shape.alpha),  # peft's annotation says int, its arithmetic takes any number
            lora_dropout=shape.dropout,
            target_modules=self._targets(shape),
            task_type="CAUSAL_LM",
        )
        inner = self.model.inner
        if self._peft is None:
            # `get_peft_model` would wrap the module that is divided into another one.
            self._peft = LoraModel(inner, config, name)
            self._active = name
        else:
            self._peft.peft_config[name] = config
            self._peft.inject_adapter(inner, name)
            # peft makes every injected adapter trainable; only the active one may be.
            self._peft.set_adapter(self._active)

    def activate(self, name: str) -> None:
        """Make this slot the one that the model computes with and whose weights have gradients."""
        if name != self._active:
            self._peft.set_adapter(name)
            self._active = name

    @contextmanager
    def without(self) -> Iterator[None]:
        """Disable all adapters inside the block."""
        self._peft.disable_adapter_layers()
        try:
            yield
        finally:
            self._peft.enable_adapter_layers()

    def named_weights(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield a slot's parameters under the names that they have in peft's files."""
        endings = tuple(f".{part}.{name}.weight" for part in _PARTS)
        for full, parameter in self.model.inner.named_parameters():
            if full.endswith(endings):
                yield f"{_PREFIX}{full.removesuffix(f'.{name}.weight')}.weight", parameter

    def base_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the model below the adapters under their Hugging Face names."""
        for full, parameter in self.model.inner.named_parameters():
            if not any(f".{part}." in full for part in _PARTS):
                yield full.replace(".base_layer.", "."), parameter

    def config(self, name: str) -> dict[str, Any]:
        """Return peft's configuration of a slot as JSON values, without the name of the base model."""
        values = self._peft.peft_config[name].to_dict()
        return {
            **{key: sorted(value) if isinstance(value, set) else value for key, value in values.items()},
            "inference_mode": True,
        }

    def drop_out(self, name: str, *, learns: bool) -> None:
        """Turn a slot's dropout on for passes that learn, and off for others."""
        for full, module in self.model.inner.named_modules():
            if full.endswith(f".lora_dropout.{name}"):
                module.train(learns)

    def _targets(self, shape: AdapterSettings) -> list[str]:
        """Return the names of the layers to adapt. Raises ConfigurationError if the model has no such linear
        layers."""
        transformer: Any = self.model.inner
        head = transformer.get_output_embeddings()
        if shape.targets == "all-linear":
            found = {name.rpartition(".")[2] for name, module in self._linear.items() if module is not head}
            if not found:
                raise ConfigurationError(
                    f"trainer.adapter.targets: {type(transformer).__name__} has no linear layers to adapt; train"
                    " without [trainer.adapter]"
                )
            return sorted(found)
        for target in shape.targets:
            meant = [each for name, each in self._linear.items() if f".{name}".endswith(f".{target}")]
            if not meant:
                names = sorted({name.rpartition(".")[2] for name in self._linear})
                raise ConfigurationError(
                    f"trainer.adapter.targets: {type(transformer).__name__} has no linear layers called {target!r};"
                    f" it has {', '.join(names)}"
                )
            if head in meant and head.weight is transformer.get_input_embeddings().weight:
                raise ConfigurationError(
                    f"trainer.adapter.targets: {target!r} is tied to the embedding, which cannot have an adapter;"
                    " remove it from the targets"
                )
        return sorted(shape.targets)


def slot_key(shape: AdapterSettings) -> tuple[object, ...]:
    """Return what adapters must have in common to share a slot: everything that their modules are built from."""
    return shape.rank, shape.alpha, shape.dropout, shape.targets


@dataclass
class _Slot:
    """The place of one adapter in the model. Its `tenant` has its tensors there; other adapters wait outside.

    Parameters keep their identity when tenants change, and only their values are exchanged: FSDP gathers from these
    very tensors, and the optimiser of each adapter refers to them.
    """

    name: str
    tenant: AdaptedPolicy | None = None


class AdaptedPolicy(Passes):
    """One adapter over the shared base as a policy. Its weights are those of the adapter alone.

    Every method that uses the weights first exchanges them with those of the slot's tenant. So parameters from
    `named_weights` are this adapter's until another adapter of the same slot is used.
    """

    def __init__(self, adapters: Adapters, name: str, shape: AdapterSettings, seed: int, slot: _Slot) -> None:
        self.adapters = adapters
        self.name = name
        self.shape = shape
        self._seed = seed
        self._slot = slot
        self._aside: list[Tensor] | None = None
        """This rank's part of the weights while another adapter has the slot."""

    @property
    def packings(self) -> frozenset[Packing]:
        return self.adapters.model.packings

    @property
    def vocabulary(self) -> int:
        return self.adapters.model.vocabulary

    @property
    def config(self) -> dict[str, Any]:
        """The content of `adapter_config.json`, without the name of the base model."""
        return self.adapters.config(self._slot.name)

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's part of the weights, wherever it is."""
        if self._aside is not None:
            return self._aside
        return [local_part(weight.detach()) for _, weight in self.adapters.named_weights(self._slot.name)]

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_weights():
            yield parameter

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        self._occupy()
        yield from self.adapters.named_weights(self._slot.name)

    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        self._occupy()
        self.adapters.activate(self._slot.name)
        if self.shape.dropout:
            self.adapters.drop_out(self._slot.name, learns=torch.is_grad_enabled())
        found: tuple[Tensor, Tensor] = self.adapters.model(*inputs)
        return found

    def vacate(self) -> None:
        """Give up the slot and the weights."""
        self._aside = None
        if self._slot.tenant is self:
            self._slot.tenant = None

    @torch.no_grad()
    def _occupy(self) -> None:
        """Put this adapter's tensors into the slot, and set those of the tenant aside."""
        slot = self._slot
        if slot.tenant is self:
            return
        if slot.tenant is not None:
            slot.tenant.set_aside()
        slot.tenant = self
        if self._aside is not None:
            aside, self._aside = self._aside, None
            for place, mine in zip(self.tensors, aside, strict=True):
                place.copy_(mine)

    def set_aside(self) -> None:
        """Copy the weights out of the slot, and drop its gradients: another run uses the slot next."""
        self._aside = [part.clone() for part in self.tensors]
        for _, weight in self.adapters.named_weights(self._slot.name):
            weight.grad = None

    def in_float32(self) -> AbstractContextManager[None]:
        return self.adapters.model.in_float32()

    def begin_anew(self) -> None:
        """Reset the adapter to its first state: A uniform within ±1/√in, as peft initialises it, and B zero.

        Every rank draws the same numbers, so the result does not depend on how the model is divided.
        """
        generator = torch.Generator().manual_seed(self._seed)
        with torch.no_grad():
            for name, parameter in self.named_weights():
                values = torch.zeros(parameter.shape)
                if f".{_PARTS[0]}." in name:
                    bound = 1 / math.sqrt(parameter.shape[1])
                    values.uniform_(-bound, bound, generator=generator)
                parameter.copy_(like(values, parameter))

    def load_base(self, directory: Path) -> None:
        """Reset the adapter. The base in memory never changes, so nothing is read from `directory`."""
        self.begin_anew()

    def load_version(self, directory: Path) -> None:
        """Load the adapter of a version that was published as an adapter, or merged with its adapter in a folder.

        Raises WeightsUnusable for a version without an adapter, or with one of another shape.
        """
        for place in (directory, directory / ADAPTER_DIRECTORY):
            if (theirs := adapter_in(place)) is not None:
                self._check(theirs, directory)
                load_weights(self.named_weights(), place)
                return
        raise WeightsUnusable(
            f"{directory} has whole weights, from which an adapter over the base model cannot continue: train without"
            " [trainer.adapter], or begin a run whose base_model is that directory"
        )

    def _check(self, theirs: dict[str, Any], directory: Path) -> None:
        ours = self.config
        other = [key for key in _SHAPE if theirs.get(key) != ours[key]]
        if other:
            stored = ", ".join(f"{key} {theirs.get(key)}" for key in other)
            configured = ", ".join(f"{key} {ours[key]}" for key in other)
            raise WeightsUnusable(
                f"{directory} has an adapter with {stored}, and [trainer.adapter] asks for {configured}: the shape of"
                " a run's adapter cannot change; set it as it was, or begin another run"
            )


class BasePolicy(Passes):
    """The model without any adapter: the reference for adapters' policies, without a second copy of the weights."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        with self._adapters.without():
            found: tuple[Tensor, Tensor] = self._adapters.model(*inputs)
        return found
