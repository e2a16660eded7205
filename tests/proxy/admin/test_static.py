from __future__ import annotations

import hashlib
import re

import pytest

from proxy.admin.templating import STATIC
from tests.proxy.overview.site import Site

VENDOR = STATIC / "vendor"


def test_vendored_files_are_the_published_ones() -> None:
    lines = (line.split("  ") for line in (VENDOR / "CHECKSUMS").read_text().splitlines())
    listed = {name: checksum for checksum, name in lines}
    present = {file.name for file in VENDOR.iterdir()} - {"CHECKSUMS", "VENDORED.md"}
    assert present == set(listed)
    for name, checksum in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == checksum, name


def test_every_vendored_file_is_accounted_for() -> None:
    account = (VENDOR / "VENDORED.md").read_text()
    for file in VENDOR.iterdir():
        if file.name not in {"CHECKSUMS", "VENDORED.md"}:
            assert f"`{file.name}`" in account


async def test_a_file_is_kept_for_ever_under_the_address_of_its_content_only(site: Site) -> None:
    page = (await site.client.get("/admin/login")).text
    addresses = re.findall(r'(?:href|src)="(/admin/static/[^"]+)"', page)
    assert len(addresses) >= 5
    for address in addresses:
        reply = await site.client.get(address)
        assert reply.status_code == 200
        assert "immutable" in reply.headers["cache-control"]
        plain = await site.client.get(address.partition("?")[0])
        assert plain.headers["cache-control"] == "no-cache"
        assert plain.headers["etag"]


@pytest.mark.parametrize("path", ["../endpoints.py", "%2e%2e/endpoints.py", "vendor/none.js", "", "vendor"])
async def test_nothing_else_is_served(site: Site, path: str) -> None:
    reply = await site.client.get(f"/admin/static/{path}")
    assert reply.status_code in {303, 404}
    assert "APIRouter" not in reply.text


def test_own_files_reach_for_nothing_outside() -> None:
    for file in [*STATIC.glob("*.js"), *STATIC.glob("*.css"), *(STATIC.parent / "templates").glob("*.html")]:
        text = file.read_text()
        assert not re.search(r"""(src|href|url\(|import|fetch\()\s*=?\s*["'(]?https?://""", text), file.name
        assert "<script>" not in text
        assert not re.search(r"""\s(on\w+|style)=["']""", text), file.name
