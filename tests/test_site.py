"""The site: it builds without a warning, its tutorials run as their pages say, and its pages fit a telephone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.comm.launching import MPIRUN, ROOT
from tests.conftest import NIGHTLY

pytest.importorskip("myst_nb", reason="the extra docs builds the site")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
PHONE = 360  # pixels
LOOKED_AT = (
    "index.html",
    "tutorials/first-map.html",
    "how-to/out-of-memory.html",
    "reference/keys.html",
    "gallery.html",
)
# What they start has tests of its own (tests/law, tests/crash, tests/test_api.py, tests/test_printed_plans.py): these
# run at night, and for `make docs`.
AT_NIGHT = () if NIGHTLY else ("cluster-plan", "four-ranks", "killed-run", "own-imagery", "swin", "time-series", "vit")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: the tutorials start ranks"),
]
# Words that the cells of a tutorial print.
PRINTED = {
    "first-map": ("wrote report runs/first/report.html", "wrote a map of 192 x 192 pixels: map.tif", "building"),
    "own-imagery": ("Halo(minimum=5, halo=6", "checked: the graph gives what Net gives", "mean IoU"),
    "time-series": ("wrote a map of 144 x 144 pixels: map.zarr", "mean IoU 9", "wheat maize meadow bare"),
    "four-ranks": ("largest difference of 5 losses", "accuracy 100.0"),
    "cluster-plan": ("#SBATCH --nodes=",),
    "swin": ("layer", "GiB a rank", "both maps have the same bytes; largest difference of 2 losses"),
    "vit": ("as small images of their own", "mean IoU"),
    "killed-run": ("the run was killed", "largest difference:"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Cells run in folders of their own; a cell that fails, or a warning, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    words = [*build, "-d", folder / "doctrees", ROOT / "docs", folder / "html"]
    environ = {**os.environ, "TILEDSEG_TUTORIALS_LEFT_OUT": " ".join(f"tutorials/{page}.md" for page in AT_NIGHT)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=1700)
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


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver on this machine")
def test_no_page_is_wider_than_a_telephone_light_or_dark(site: Path, tmp_path: Path) -> None:
    """Screenshots of the front page and a page of each kind show both themes."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    pages = [page for kind in ("*.html", "*/*.html") for page in site.glob(kind) if "_modules" not in page.parts]
    assert len(pages) > 60
    options, wide, light = webdriver.ChromeOptions(), {}, {}
    options.binary_location = CHROMIUM
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{word}")
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        size = {"width": PHONE, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for theme, some in (("light", sorted(pages)), ("dark", [site / page for page in LOOKED_AT])):
            scheme = {"name": "prefers-color-scheme", "value": theme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            for page in some:
                browser.get(page.as_uri())
                name = str(page.relative_to(site))
                pixels = browser.execute_script("return document.documentElement.scrollWidth")
                if pixels > PHONE:
                    wide[theme, name] = pixels
                if name in LOOKED_AT:
                    picture = tmp_path / f"{theme}-{name.replace('/', '-')}.png"
                    assert browser.save_screenshot(str(picture))
                    light[theme, name] = float(imread(picture)[..., :3].mean())
    assert wide == {}
    assert all((value > 0.6) == (theme == "light") for (theme, _), value in light.items()), light
