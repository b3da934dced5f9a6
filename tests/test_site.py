"""The site: it builds without a warning, its tutorials run as their pages say, and its pages fit a telephone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comm.launching import MPIRUN, ROOT
from tests.conftest import NIGHTLY

pytest.importorskip("myst_nb", reason="the extra docs builds the site")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
PHONE, DESK = 360, 1280
# What they start by mpirun has tests of its own (tests/law, tests/crash): these run at night, and for `make docs`.
AT_NIGHT = () if NIGHTLY else ("four-ranks", "killed-run")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: the tutorials start ranks"),
]
# Words that the cells of a tutorial print.
PRINTED = {
    "first-map": ("wrote report runs/first/report.html", "wrote a map of 192 x 192 pixels: map.tif", "building"),
    "own-imagery": ("Halo(minimum=5, halo=6", "checked: the graph gives what Net gives", "mean IoU"),
    "four-ranks": ("largest difference of 5 losses", "accuracy 100.0"),
    "cluster-plan": ("#SBATCH --nodes=",),
    "killed-run": ("the run was killed", "largest difference:"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Cells run in folders of their own; a cell that fails, or a warning, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    # A cell of bash that has not run is read as Python by Sphinx.
    plain = [f"nb_execution_excludepatterns={','.join(f'tutorials/{page}.md' for page in AT_NIGHT)}"]
    plain += ["suppress_warnings=myst.header,misc.highlighting_failure"]
    options = [word for each in plain for word in ("-D", each)] if AT_NIGHT else []
    words = [*build, *options, "-d", folder / "doctrees", ROOT / "docs", folder / "html"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.mark.parametrize("page", [page for page in PRINTED if page not in AT_NIGHT])
def test_a_tutorial_prints_and_draws_what_its_page_says(page: str, site: Path) -> None:
    assert set(PRINTED) == {path.stem for path in (ROOT / "docs/tutorials").glob("*.md")}
    (notebook,) = (site / "_downloads").glob(f"*/{page}.ipynb")
    outputs = [one for cell in json.loads(notebook.read_text())["cells"] for one in cell.get("outputs", ())]
    text = "".join("".join(one.get("text", one.get("data", {}).get("text/plain", ""))) for one in outputs)
    assert [words for words in PRINTED[page] if words not in text] == []
    assert "Traceback" not in text
    assert any("image/png" in one.get("data", {}) for one in outputs), "a tutorial has a picture"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium", reason="selenium drives the browser")
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium with its chromedriver on this machine")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{word}")
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.parametrize("width", [PHONE, *([DESK] if NIGHTLY else [])])
def test_no_page_is_wider_than_the_screen(width: int, site: Path, browser: Any) -> None:
    pages = [page for kind in ("*.html", "*/*.html") for page in site.glob(kind) if "_modules" not in page.parts]
    assert len(pages) > 60
    resize(browser, width)
    wide = {}
    for page in sorted(pages):
        browser.get(page.as_uri())
        pixels = browser.execute_script("return document.documentElement.scrollWidth")
        if pixels > width:
            wide[str(page.relative_to(site))] = pixels
    assert wide == {}


@pytest.mark.parametrize("page", ["index", "reference/keys"])
def test_pages_are_light_or_dark_as_the_reader_wants(page: str, site: Path, browser: Any, tmp_path: Path) -> None:
    """Screenshots in both themes; TILEDSEG_SCREENSHOTS names a folder that keeps them, to be looked at."""
    from PIL import Image, ImageStat

    folder = Path(os.environ.get("TILEDSEG_SCREENSHOTS", tmp_path))
    brightness = {}
    for width in (PHONE, DESK):
        resize(browser, width)
        browser.get((site / f"{page}.html").as_uri())
        for theme in ("light", "dark"):
            browser.execute_script("document.body.dataset.theme = arguments[0]", theme)
            path = folder / f"{page.replace('/', '-')}-{width}-{theme}.png"
            assert browser.save_screenshot(str(path))
            with Image.open(path) as image:
                brightness[theme] = ImageStat.Stat(image.convert("L")).mean[0]
        assert brightness["dark"] < 90 < 180 < brightness["light"]
