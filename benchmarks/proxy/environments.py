"""Virtual environments for the systems that base-rl is compared with, made when first needed and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_READY = ".ready"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with what pip makes of `requirements`."""

    name: str
    requirements: tuple[str, ...]

    def made(self) -> Path:
        """Return the environment's directory; install it first if needed, which takes minutes. Raises
        CalledProcessError."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        directory = cache / "base-rl" / "bench" / f"{self.name}-{python}"
        stamp, wanted = directory / _READY, "\n".join(self.requirements)
        if stamp.is_file() and stamp.read_text() == wanted:
            return directory
        print(f"installing {', '.join(self.requirements)} in {directory} …", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = (directory / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([*pip, *self.requirements], check=True)
        stamp.write_text(wanted)
        return directory

    def version(self, package: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        run = subprocess.run([self.made() / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
        return run.stdout.strip()


LITELLM = Environment("litellm", ("litellm[proxy]>=1.106,<1.107",))
PY_SPY = Environment("py-spy", ("py-spy",))
RLLM_GATEWAY = Environment("rllm-gateway", ("rllm-model-gateway==0.1.0",))
