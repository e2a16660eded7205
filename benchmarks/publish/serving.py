"""The other side of a version: an engine with the proxy's check in front of it, and an object store."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from proxy.contract.exchange import Offer
from proxy.contract.memory import place_in_memory
from proxy.contract.policy import WeightsReference
from proxy.engines.launch import embedded_plan, wait_until_ready
from proxy.engines.sglang import SglangEngine
from proxy.serving.offers import join
from proxy.settings import EngineSettings
from proxy.versions.inspector import WeightsInspector
from trainer.config import SharedDirectory, TensorsWeights
from trainer.publish.publisher import Staged
from trainer.publish.shards import content_of

BUCKET = "weights"


class Served:
    """An embedded engine and the proxy's check of a version, in front of it."""

    def __init__(self, model: Path, root: Path) -> None:
        self._plan = embedded_plan(model=str(model), port=free_port())
        self._model, self._root, self._labels, self._before = str(model), root, 0, ""
        self._process = subprocess.Popen(
            self._plan.argv,
            env={**os.environ, **self._plan.env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Served:
        asyncio.run(wait_until_ready(self._plan.url, timeout=180, process_alive=lambda: self._process.poll() is None))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def serve(self, staged: Staged, settings: SharedDirectory) -> Path:
        """Check a version as the proxy does and load it. Return the directory that the engine has read, or would."""
        if staged.offer is not None:
            asyncio.run(self._receive(staged.weights, staged.offer))
            return Path(staged.weights.uri)
        return asyncio.run(self._serve(staged.weights, settings))

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether the engine computes with exactly these tensors, in its own precision of float32."""

        async def ask() -> Mapping[str, str]:
            engine = self._client()
            try:
                return await engine.checksums()
            finally:
                await engine.aclose()

        sums = asyncio.run(ask())
        wanted = {name: sha256(content_of(tensor.float())).hexdigest()[:16] for name, tensor in tensors.items()}
        return wanted.items() <= sums.items()

    def _client(self) -> SglangEngine:
        return SglangEngine(self._plan.url, EngineSettings(url=self._plan.url))

    async def _receive(self, weights: WeightsReference, offer: Offer) -> None:
        self._labels += 1
        inspector = WeightsInspector(self._root, senders=("127.0.0.1",))
        engine = self._client()
        try:
            await inspector.check_offer(weights, offer, self._model)
            await engine.receive_weights(await join(offer, 1), offer, f"version-{self._labels}")
        finally:
            await engine.aclose()
            await inspector.aclose()

    async def _serve(self, weights: WeightsReference, settings: SharedDirectory) -> Path:
        self._labels += 1
        label = f"version-{self._labels}"
        memory = settings.memory if isinstance(settings, TensorsWeights) else None
        # Without the trainer's disk, so that versions are fetched.
        root = self._root if settings.url is None else self._root / "elsewhere"
        inspector = WeightsInspector(root, self._root / "cache", 10**12, url=settings.url, memory=memory)
        engine = self._client()
        try:
            if memory is None:
                await inspector.check(weights, self._model)
                path = inspector.path_of(weights)
            else:
                await inspector.check_in_memory(weights, self._model)
                path = str(place_in_memory(weights, memory))
            await engine.load_weights(path, label)
            if (await engine.info()).weight_label != label:
                raise RuntimeError("the engine does not serve the version that it loaded")
        finally:
            await engine.aclose()
            await inspector.aclose()
        for made in (self._root / "cache").glob("*"):
            if made.name not in (Path(path).name, self._before):
                shutil.rmtree(made)
        self._before = Path(path).name
        return Path(path)


@contextmanager
def object_store() -> Iterator[None]:
    """Run an S3 server (moto's) in a process of its own, which the AWS environment names."""
    import boto3  # type: ignore[import-untyped]

    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        wait_for_port(port, server)
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET)
        yield
    finally:
        server.terminate()
        server.wait(30)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server accepts connections, for a minute at most."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the object store did not start") from None
            time.sleep(0.1)
