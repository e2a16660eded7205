"""Errors of published weights."""

from __future__ import annotations

from proxy.errors import InvalidRequest, Unavailable


class WeightsRejected(InvalidRequest):
    """The version must not be served. The message is the reason, as people read it on the page and in the log."""

    code = "weights_rejected"

    def __init__(self, reason: str, *, param: str = "weights") -> None:
        super().__init__(reason, param=param)


class WeightsMissing(WeightsRejected):
    """Files are not there. They may still appear: file systems of a network show them late. `is_storage_there`: only
    the version is missing, and not the folder that held it too."""

    def __init__(self, reason: str, *, param: str = "weights", is_storage_there: bool = True) -> None:
        super().__init__(reason, param=param)
        self.is_storage_there = is_storage_there


class StorageUnavailable(Unavailable):
    """The storage with the weights cannot be read at the moment: nothing is known about the version."""

    code = "storage_unavailable"
