"""How the tests of clients read a page. No client is installed for these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.pages import ADDRESS, KEY, PAGES, parse_page, read_page

INSTALL = "## Install\n```bash\npip install x\n```\n"
RUN = "## Run\n```bash\nx\n```\n"


def test_a_page_is_what_it_installs_its_files_and_its_commands() -> None:
    file = '```toml title="~/.x/config.toml"\nurl = "http://127.0.0.1:8080/v1"\n```\n'
    page = parse_page("x", f"{INSTALL}## Point\n```bash\nexport KEY={KEY}\n```\n{file}{RUN}```text\nlook\n```\n")
    assert page.install == "pip install x\n"
    assert page.commands == f"export KEY={KEY}\n\nx\n"
    assert page.files == {"~/.x/config.toml": f'url = "{ADDRESS}/v1"\n'}


def test_the_address_and_the_key_are_replaced_everywhere(tmp_path: Path) -> None:
    page = parse_page("x", f'{INSTALL}{RUN}```python title="a.py"\n{ADDRESS} {KEY}\n```\n')
    page.pointed_at("http://there", "key").write_files(tmp_path, tmp_path / "home")
    assert (tmp_path / "a.py").read_text() == "http://there key\n"


@pytest.mark.parametrize("block", ["```\nx\n```\n", "```python\nx\n```\n", "```bash titel=x\n```\n"])
def test_a_block_that_no_reader_could_follow_is_found(block: str) -> None:
    with pytest.raises(ValueError, match="x: a block"):
        parse_page("x", INSTALL + RUN + block)


@pytest.mark.parametrize("text", [INSTALL, RUN])
def test_a_page_says_how_to_install_and_what_to_run(text: str) -> None:
    with pytest.raises(ValueError, match="how to install"):
        parse_page("x", text)


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_every_page_can_be_followed(path: Path) -> None:
    if path.stem != "README":
        read_page(path.stem)
