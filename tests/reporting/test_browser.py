"""The page in a real browser: what can be clicked does what it says, and nothing is complained about."""

from __future__ import annotations

import re
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


def click(browser: Any, element: Any) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def shares(browser: Any, column: int) -> list[float]:
    cells = every(browser, f".sortable tbody tr > :nth-child({column})")
    return [float(re.sub(r"[^\d.]", "", cell.text)) for cell in cells]


def test_tables_are_sorted_by_any_column(browser: Any) -> None:
    headings = every(browser, ".sortable thead button")
    click(browser, headings[1])
    assert shares(browser, 2) == sorted(shares(browser, 2), reverse=True)
    click(browser, headings[1])
    assert shares(browser, 2) == sorted(shares(browser, 2))
    click(browser, headings[5])
    assert shares(browser, 6) == sorted(shares(browser, 6), reverse=True)
    click(browser, headings[0])
    names = [row.text for row in every(browser, ".sortable tbody th")]
    assert names[:2] == ["field", '<b>road & "rail"</b>']


def test_a_cell_of_the_confusion_matrix_says_its_number(browser: Any) -> None:
    cells = every(browser, ".matrix tbody td")
    assert len(cells) == 9
    click(browser, cells[1])
    words = one(browser, "#cell").text
    assert re.fullmatch(r'field, mapped as <b>road & "rail"</b>: \d+ pixels, [\d.]+ % of the class', words)


def test_the_slider_changes_the_maps_and_leaves_the_images(browser: Any) -> None:
    def sources() -> list[str]:
        return [image.get_attribute("src") for image in every(browser, ".place img")]

    last, when = sources(), one(browser, "#when").text
    click(browser, one(browser, "#before"))
    former = sources()
    assert one(browser, "#when").text != when
    assert [mine == theirs for mine, theirs in zip(last, former, strict=True)] == [True, True, False, False] * 2
    click(browser, one(browser, "#after"))
    click(browser, one(browser, "#after"))
    assert (sources(), one(browser, "#when").text) == (last, when), "there is none after the last"
    loaded = "return [...document.querySelectorAll('.place img')].every(i => i.complete && i.naturalWidth)"
    assert browser.execute_script(loaded)


def test_a_picture_is_shown_large_and_put_away(browser: Any) -> None:
    click(browser, every(browser, ".picture")[2])
    dialog = one(browser, "#large")
    assert dialog.is_displayed()
    assert dialog.find_element("tag name", "p").text == "map: <i>out.tif all of it, every 2nd pixel"
    dialog.find_element("css selector", ".close").click()
    assert not dialog.is_displayed()


def test_diagrams_of_each_class(browser: Any) -> None:
    from selenium.webdriver.support.select import Select

    def shown() -> list[str]:
        return [d.get_attribute("data-diagram") for d in every(browser, ".diagram") if d.is_displayed()]

    assert shown() == ["0"]
    Select(one(browser, "#diagram")).select_by_index(2)
    assert shown() == ["2"]


def test_curves_say_their_numbers(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    charts = every(browser, ".chart")
    assert len(charts) == 4
    for chart in charts:
        drawing = chart.find_element("tag name", "svg")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", drawing)
        ActionChains(browser).move_to_element(drawing).perform()
        assert re.search(r"step \d+: [\d.e-]+$", chart.find_element("tag name", "output").text)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_can_be_read_in_both_themes(browser: Any, theme: str) -> None:
    for _ in range(2):
        if browser.execute_script("return document.documentElement.dataset.theme") != theme:
            click(browser, one(browser, "#theme"))
    colours = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    ink, paper = ([int(n) for n in re.findall(r"\d+", colour)] for colour in browser.execute_script(colours))
    assert abs(sum(ink[:3]) - sum(paper[:3])) > 450


def test_a_phone_shows_it_without_scrolling_sideways(browser: Any) -> None:
    browser.set_window_size(PHONE, 800)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": PHONE, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE
    smallest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('.chart svg')].map(s => 12 * s.getScreenCTM().a))"
    )
    assert smallest > 8, "pixels of the letters in charts"
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_nothing_was_complained_about(browser: Any) -> None:
    """The last test: after everything was clicked."""
    assert browser.get_log("browser") == []
