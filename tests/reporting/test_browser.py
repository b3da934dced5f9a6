"""The page in a real browser: the slider shows each validation, and the browser complains about nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reporting.made_run import make_run
from tiledseg.report import main

pytest.importorskip("selenium", reason="selenium drives the browser")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver on this machine"),
]
PHONE = 360


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser that has opened the page."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    folder = tmp_path_factory.mktemp("browser") / "run"
    make_run(folder)
    assert main(["--run", str(folder)]) == 0
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,900"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    driver.get((folder / "report.html").as_uri())
    yield driver
    driver.quit()


def every(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def one(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def test_the_slider_changes_the_panel(browser: Any) -> None:
    def shown() -> list[str]:
        return [image.get_attribute("src") for image in every(browser, ".panel img") if image.is_displayed()]

    (last,), when = shown(), one(browser, "#when").text
    one(browser, "#moment").send_keys("\ue012")  # the key for left
    (former,) = shown()
    assert one(browser, "#when").text != when
    assert former != last
    one(browser, "#moment").send_keys("\ue014")
    assert (shown(), one(browser, "#when").text) == ([last], when)
    loaded = "return [...document.images].every(i => i.complete && i.naturalWidth)"
    assert browser.execute_script(loaded)


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any) -> None:
    browser.set_window_size(PHONE, 800)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": PHONE, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_nothing_was_complained_about(browser: Any) -> None:
    """The last test: after everything was clicked."""
    assert browser.get_log("browser") == []
