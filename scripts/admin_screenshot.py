"""Take a picture of an admin page, signed in: `python scripts/admin_screenshot.py URL ADMIN_KEY OUTPUT.png`.

Needs the `playwright` package and a Chromium (`--chromium`, by default Debian's); nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urljoin

from playwright.sync_api import sync_playwright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the page, such as http://127.0.0.1:8080/admin/runs/calculator")
    parser.add_argument("key", help="an admin key")
    parser.add_argument("output", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("--window-only", action="store_true", help="what the window shows, not the whole page")
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels per pixel")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    take(parser.parse_args())


def take(options: argparse.Namespace) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            device_scale_factor=options.scale,
            color_scheme="dark" if options.dark else "light",
        )
        page.goto(urljoin(options.url, "/admin/login"))
        page.get_by_label("Key").fill(options.key)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(lambda url: not url.endswith("/login"))
        page.goto(options.url)
        page.evaluate("document.fonts.ready")
        if page.locator("#chart-reward").count():
            page.wait_for_selector("#chart-reward canvas, #chart-reward[data-empty]")
            page.wait_for_selector(".connection.on")
        page.screenshot(path=options.output, full_page=not options.window_only)
        browser.close()


if __name__ == "__main__":
    main()
