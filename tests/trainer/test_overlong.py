"""How the run's bound on answers reaches the trainer: with the head, from the real proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.real_proxy import real_proxy, write_real_model
from trainer.errors import ConfigurationError


def test_the_penalty_follows_the_proxys_bound(tmp_path: Path) -> None:
    """The tiny model's context is 512 tokens; the run allows answers of 1024."""
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        with (
            pytest.raises(ConfigurationError, match=r"run.max_new_tokens: .* up to 1024 tokens, .* context is 512"),
            proxy.trainer(algorithm={"preset": "dapo"}),
        ):
            pass
        with proxy.trainer(algorithm={"preset": "dapo", "overlong_tokens": 64}) as trainer:
            algorithm = trainer.loop.algorithm
            assert (algorithm.overlong_tokens, algorithm.overlong_tail) == (64, 13)
