from __future__ import annotations

from tests.proxy.calls.conftest import chat_url, template, world

__all__ = ["chat_url", "template", "world"]
