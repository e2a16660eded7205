"""Versions in an S3 object store: upload in parts, parallel ranges into a directory, listing and removal.

```
s3://BUCKET/PREFIX/RUN_ID/v000012-1f6b09c2/model.safetensors    the version's files under their paths
```
A version has the key of the last two names of its directory, so trainer and proxy need no path in common. Endpoint,
region and credentials are those of the AWS environment (`AWS_ENDPOINT_URL_S3`, `AWS_PROFILE`, …).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from proxy.contract.extras import install_command
from proxy.contract.policy import WeightsReference

PART_BYTES = 16 << 20
"""Bytes of a part and of a range. S3 takes at most 10,000 parts, so larger files have larger parts."""
_MOST_PARTS = 10_000
_PARALLEL = 8
_REMOVED_AT_ONCE = 1000
# Short enough that a process that ends does not wait long for its threads.
_LONGEST_PAUSE = 5.0
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9._-]+)*)")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
# Answers that a repetition does not change. Everything else may be an outage.
_FINAL = {
    "403",
    "AccessDenied",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "NoSuchBucket",
    "InvalidBucketName",
}
_MISSING = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}

_Value = TypeVar("_Value")


class ObjectStoreUnavailable(OSError):
    """The object store does not answer, throttles, or refuses the credentials; the message says which."""


class ObjectMissing(OSError):
    """There is no such object."""


def check_url(url: str) -> str:
    """Return a URL without a slash at its end. Raises ValueError unless it is s3://BUCKET or s3://BUCKET/PREFIX."""
    url = url.rstrip("/")
    match = _URL.fullmatch(url)
    if match is None or any(name in (".", "..") for name in url.split("/")):
        raise ValueError(f"{url!r} is no place in an object store: write s3://BUCKET/PREFIX")
    return url


def key_of(weights: WeightsReference) -> str:
    """Return the key of a version below the prefix, RUN_ID/NAME. Raises ValueError if its directory has no such."""
    parts = weights.uri.split("/")[-2:]
    if len(parts) != 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise ValueError(f"{weights.uri!r} does not end in the names of a run and a version")
    return "/".join(parts)


class ObjectStore:
    """The objects below a URL. A request that fails for a passing reason is repeated with growing pauses for
    `patience` seconds, unless `is_stopping`. Safe to use from several threads."""

    def __init__(self, url: str, patience: float, is_stopping: Callable[[], bool] = lambda: False) -> None:
        bucket, _, prefix = check_url(url).removeprefix("s3://").partition("/")
        self.url = url
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._patience = patience
        self._is_stopping = is_stopping
        self._client = _new_client()
        self._pause = threading.Event()

    def upload(self, file: Path, key: str) -> None:
        """Write a file to an object; a large one in parallel parts, each of which is repeated alone.

        Raises ObjectStoreUnavailable, OSError."""
        size = file.stat().st_size
        place = {"Bucket": self._bucket, "Key": self._prefix + key}
        if size <= PART_BYTES:
            content = file.read_bytes()
            self._persist(lambda: self._client.put_object(**place, Body=content))
            return
        step = max(PART_BYTES, -(-size // _MOST_PARTS))
        upload = self._persist(lambda: self._client.create_multipart_upload(**place))["UploadId"]

        def send(begin: int) -> dict[str, Any]:
            number = begin // step + 1
            content = _read(file, begin, step)
            sent = self._persist(
                lambda: self._client.upload_part(**place, UploadId=upload, PartNumber=number, Body=content)
            )
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            with ThreadPoolExecutor(_PARALLEL, "upload") as pool:
                parts = list(pool.map(send, range(0, size, step)))
            self._persist(
                lambda: self._client.complete_multipart_upload(
                    **place, UploadId=upload, MultipartUpload={"Parts": parts}
                )
            )
        except ObjectMissing as error:
            # An answer to the completion that was lost: the repetition finds an upload that has ended.
            if not self._has(key, size):
                raise ObjectStoreUnavailable(
                    f"{self.url}: the upload of {key} was aborted by another process"
                ) from error

    def _has(self, key: str, size: int) -> bool:
        try:
            return self.size(key) == size
        except ObjectMissing:
            return False

    def size(self, key: str) -> int:
        """Return the bytes of an object. Raises ObjectMissing, ObjectStoreUnavailable."""
        found = self._persist(lambda: self._client.head_object(Bucket=self._bucket, Key=self._prefix + key))
        return int(found["ContentLength"])

    def read(self, key: str, begin: int, count: int) -> bytes:
        """Return `count` bytes of an object from `begin`. Raises ObjectMissing, ObjectStoreUnavailable."""

        def read() -> bytes:
            span = f"bytes={begin}-{begin + count - 1}"
            found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, Range=span)
            content: bytes = found["Body"].read(count + 1)
            if len(content) != count:
                raise ConnectionError(f"{len(content)} bytes instead of {count}")
            return content

        return self._persist(read)

    def keys(self, prefix: str) -> dict[str, float]:
        """Return the keys below a prefix with the times of their last change. Raises ObjectStoreUnavailable."""
        return {key: when for page in self._pages("list_objects_v2", prefix) for key, when in self._listed(page)}

    def remove(self, prefix: str) -> None:
        """Remove all objects below a prefix and the uploads to it that never ended. Raises ObjectStoreUnavailable."""
        keys = list(self.keys(prefix))
        for first in range(0, len(keys), _REMOVED_AT_ONCE):
            self._remove(keys[first : first + _REMOVED_AT_ONCE])
        for upload in self._unfinished(prefix):
            place = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            self._abort(place)

    def unfinished(self, prefix: str) -> int:
        """Return the number of uploads below a prefix that never ended. Raises ObjectStoreUnavailable."""
        return len(self._unfinished(prefix))

    def _remove(self, keys: Sequence[str]) -> None:
        named = {"Objects": [{"Key": self._prefix + key} for key in keys]}
        removed = self._persist(lambda: self._client.delete_objects(Bucket=self._bucket, Delete=named))
        # S3 answers 200 although it refused some of the objects.
        if refused := removed.get("Errors"):
            raise ObjectStoreUnavailable(
                f"{self.url}: {refused[0].get('Key')} is not removed: {refused[0].get('Code')}"
            )

    def _abort(self, upload: Mapping[str, str]) -> None:
        # Somebody else may have aborted it meanwhile.
        with suppress(ObjectMissing):
            self._persist(lambda: self._client.abort_multipart_upload(**upload))

    def _unfinished(self, prefix: str) -> list[dict[str, Any]]:
        pages = self._pages("list_multipart_uploads", prefix)
        return [upload for page in pages for upload in page.get("Uploads", ())]

    def _listed(self, page: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        for each in page.get("Contents", ()):
            yield each["Key"].removeprefix(self._prefix), each["LastModified"].timestamp()

    def _pages(self, operation: str, prefix: str) -> list[dict[str, Any]]:
        pages = self._client.get_paginator(operation)
        return self._persist(lambda: list(pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)))

    def _persist(self, request: Callable[[], _Value]) -> _Value:
        from botocore.exceptions import (  # type: ignore[import-untyped]
            BotoCoreError,
            ClientError,
            NoCredentialsError,
        )

        deadline, pause = time.monotonic() + self._patience, 0.2
        while True:
            try:
                return request()
            except NoCredentialsError as error:
                raise ObjectStoreUnavailable(f"{self.url}: {error}; set AWS_PROFILE or AWS_ACCESS_KEY_ID") from error
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code"))
                if code in _MISSING:
                    raise ObjectMissing(f"{self.url} lacks an object of the version") from error
                reason: Exception = error
                is_final = code in _FINAL
            except (BotoCoreError, OSError) as error:
                reason, is_final = error, False
            if is_final or time.monotonic() + pause > deadline or self._is_stopping():
                raise ObjectStoreUnavailable(f"{self.url}: {reason}") from reason
            self._pause.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _new_client() -> Any:
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"an object store needs boto3: in the clone, {install_command('object-store')}") from error
    # The pauses between attempts are `_persist`'s, which knows when to stop; botocore adds two quick ones of its own.
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=_PARALLEL,
        retries={"mode": "standard", "total_max_attempts": 2},
    )
    return boto3.session.Session().client("s3", config=config)


def _read(file: Path, begin: int, count: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(begin)
        return stream.read(count)
