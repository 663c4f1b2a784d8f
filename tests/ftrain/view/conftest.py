"""One browser for all pages."""

from collections.abc import Iterator

import pytest

from tests.chromium import Browser, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    if find_chromium() is None:
        pytest.skip("Chromium is missing: apt install chromium-headless-shell")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
