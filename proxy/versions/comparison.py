"""Compare a version with its parent, whose files are read again only if the sizes of its tensors are not known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.contract.delta import DeltaUnusable, LocalWeights
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.errors import StorageUnavailable, WeightsMissing, WeightsRejected
from proxy.log import logger
from proxy.versions.norms import (
    Sizes,
    check_change,
    check_growth,
    read_headers,
    read_sizes,
    shapes_in,
    sizes_of,
    usual_sizes,
)
from proxy.versions.safetensors import Header

# Versions whose sizes are remembered: those of a head and its next version for several runs.
_REMEMBERED = 16

_LOG = logger(__name__)


class ParentComparison:
    """Compares sizes of tensors, which may change by a factor of `most` from a version to the next. One thread calls
    the methods. `find_base` returns the directory of a base model, None if it is not on this machine."""

    def __init__(
        self,
        local: LocalWeights,
        find_base: Callable[[str], Path | None],
        is_cancelled: Callable[[], bool],
        *,
        most: float,
    ) -> None:
        self._local = local
        self._find_base = find_base
        self._is_cancelled = is_cancelled
        self._most = most
        self._sizes: dict[str, Sizes] = {}
        """By a version's name and checksum, or the name of a base model."""

    def learn(self, weights: WeightsReference, squares: Mapping[str, float], headers: Mapping[str, Header]) -> None:
        """Remember a version by the sums of squares that a reading of its files has given."""
        self._remember(_key(weights), sizes_of(squares, headers))

    def compare(
        self, weights: WeightsReference, parent: WeightsReference | None, base_model: str, *, floor: float
    ) -> None:
        """Raise WeightsRejected if a tensor is far larger or smaller than in the parent, the base model for None.

        A parent that cannot be read is not compared, because that is no fault of the version. Raises InterruptedError
        once `is_cancelled` returns True.
        """
        has_parent = parent is not None and parent.format is weights.format
        is_first_adapter = weights.format is WeightsFormat.ADAPTER and not has_parent
        try:
            sizes = self._sizes_of(weights)
            if is_first_adapter:
                _, directory = self._local.materialise(weights)
                before = usual_sizes(shapes_in(read_headers(directory)))
            else:
                before = self._sizes_of(parent) if parent is not None and has_parent else self._sizes_in(base_model)
        except InterruptedError:
            raise
        except (WeightsRejected, WeightsMissing, StorageUnavailable, DeltaUnusable, OSError) as error:
            # The version itself has just been read, so this is about the parent.
            _LOG.warning("version not compared with its parent", weights=weights.uri, error=str(error))
            return
        if is_first_adapter:
            check_growth(sizes, before, most=self._most)
        else:
            check_change(sizes, before, most=self._most, floor=floor)

    def _sizes_of(self, weights: WeightsReference) -> Sizes:
        key = _key(weights)
        if key not in self._sizes:
            _, directory = self._local.materialise(weights)
            self._remember(key, read_sizes(directory, self._is_cancelled))
        return self._sizes[key]

    def _sizes_in(self, base_model: str) -> Sizes:
        if base_model not in self._sizes:
            directory = self._find_base(base_model)
            self._remember(base_model, {} if directory is None else read_sizes(directory, self._is_cancelled))
        return self._sizes[base_model]

    def _remember(self, key: str, sizes: Sizes) -> None:
        self._sizes[key] = sizes
        while len(self._sizes) > _REMEMBERED:
            del self._sizes[next(iter(self._sizes))]


def _key(weights: WeightsReference) -> str:
    # Without the place: a version may be read in memory first, and on the disk later.
    return f"{'/'.join(Path(weights.uri).parts[-2:])} {weights.sha256}"
