"""The HTML report in a real browser, opened from disk as a maintainer would."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
from report_pages import every_kind, notebook, render
from run_directories import (
    BROKEN_AT,
    HOSTILE,
    ORIGIN,
    PROMOTES,
    REJECTS,
    Shape,
    failing_run,
    large_run,
    mismatched_run,
)
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--window-size=1400,900",
)

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that the command line prints for a run that overflows."""
    directory = failing_run(tmp_path_factory.mktemp("runs") / "climbing")
    return render(directory)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """A headless Chromium for all tests of this file."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: webdriver.Chrome, page: Path) -> Iterator[webdriver.Chrome]:
    """The page, freshly loaded; a test fails if anything was written to the console."""
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    browser.get(page.as_uri())
    yield browser
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def rows(browser: webdriver.Chrome) -> list[WebElement]:
    """The rows of the module table."""
    return browser.find_elements(By.CSS_SELECTOR, ".row")


def names(browser: webdriver.Chrome) -> list[str]:
    """The names shown in the module table, top to bottom."""
    script = "return [...document.querySelectorAll('.row .name b')].map((name) => name.textContent)"
    return list(browser.execute_script(script))  # type: ignore[no-untyped-call]


def button(browser: webdriver.Chrome, title: str) -> WebElement:
    """The button of that title."""
    return browser.find_element(By.XPATH, f"//button[normalize-space()='{title}']")


def selected(browser: webdriver.Chrome) -> WebElement:
    """The row that is chosen."""
    return browser.find_element(By.CSS_SELECTOR, ".row[aria-selected='true']")


def detail(browser: webdriver.Chrome) -> str:
    """The text about the chosen module."""
    return browser.find_element(By.CSS_SELECTOR, ".detail").text


def test_the_origin_is_in_view_at_once(opened: webdriver.Chrome) -> None:
    """Without a click: headline, the marked row, its first infinite step, and what is known of it."""
    assert opened.find_element(By.TAG_NAME, "h1").text == "float16 overflows in layers.1.mlp at step 14."
    row = selected(opened)
    assert "ORIGIN" in row.text
    assert f"inf @ {BROKEN_AT}" in row.text
    assert opened.find_element(By.CSS_SELECTOR, ".tools strong").text == str(BROKEN_AT)
    said = detail(opened)
    for expected in (ORIGIN, "f16 max 65,504", "12 inf", "aten.mul.Tensor", "modeling.py:42", "originates here", "again in float32: finite, absmax 90,000",
                     "it casts to the dtype of its weights"):  # fmt: skip
        assert expected in said


def test_the_magnitude_is_seen_to_climb(opened: webdriver.Chrome) -> None:
    """The colours of the origin's row rise step by step and end in the hatching of inf; the cured run goes on beside it."""
    before, after = selected(opened).find_elements(By.CSS_SELECTOR, ".heat")
    shades = [path.get_attribute("class") for path in before.find_elements(By.CSS_SELECTOR, ".cell")]
    assert shades == [f"cell l{i}" for i in range(5, 10)] + ["cell inf"]
    hatched = before.find_element(By.CSS_SELECTOR, ".inf").value_of_css_property("fill")
    assert "hatch-inf" in hatched
    assert not after.find_elements(By.CSS_SELECTOR, ".inf")
    width = [float(part.find_element(By.TAG_NAME, "svg").get_attribute("width") or 0) for part in (before, after)]
    assert width[0] / width[1] == pytest.approx(BROKEN_AT / 20, abs=0.01)


def test_filtering_leaves_what_matches_and_its_containers(opened: webdriver.Chrome) -> None:
    """Typing narrows the tree at once, the count says how far, Escape brings everything back."""
    everything = names(opened)
    search = opened.find_element(By.CSS_SELECTOR, "input[type=search]")
    search.send_keys("rmsnorm")
    assert [name for name in names(opened) if name == "input_layernorm"] == ["input_layernorm"] * 3
    assert "mlp" not in names(opened)
    assert opened.find_element(By.CSS_SELECTOR, ".count").text.startswith("3 of ")
    search.send_keys("no such thing")
    assert "No module matches" in opened.find_element(By.CSS_SELECTOR, ".rows").text
    search.send_keys(Keys.ESCAPE)
    assert names(opened) == everything
    button(opened, "not finite").click()
    assert names(opened)[-1] == "mlp"
    assert opened.find_element(By.CSS_SELECTOR, ".count").text.startswith("1 of ")
    button(opened, "not finite").click()
    button(opened, "dtype changes").click()
    assert "embed_tokens" in names(opened)
    assert opened.find_element(By.CSS_SELECTOR, ".count").text.startswith("2 of ")


def test_every_way_leads_to_the_origin(opened: webdriver.Chrome) -> None:
    """From the verdict, from the button above the table and with a key, whatever was filtered or chosen before."""
    search = opened.find_element(By.CSS_SELECTOR, "input[type=search]")
    for go in (
        lambda: opened.find_element(By.CSS_SELECTOR, "#verdict .goto").click(),
        lambda: button(opened, "Go to the origin").click(),
        lambda: opened.find_element(By.CSS_SELECTOR, ".row").send_keys("o"),
    ):
        search.clear()
        search.send_keys("lm_head")
        rows(opened)[-1].click()
        assert "lm_head" in detail(opened)
        opened.execute_script("scrollTo(0, 0)")  # type: ignore[no-untyped-call]
        go()
        assert "ORIGIN" in selected(opened).text
        assert detail(opened).startswith(ORIGIN)
        assert opened.switch_to.active_element == selected(opened)


def test_the_table_can_be_used_with_keys_alone(opened: webdriver.Chrome) -> None:
    """Arrows walk, close and open; comma and full stop change the step; slash filters; Enter shows."""
    button(opened, "Go to the origin").click()
    opened.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    closed = opened.switch_to.active_element
    assert closed.get_attribute("aria-expanded") == "false"
    closed.send_keys(Keys.ARROW_RIGHT)
    assert opened.switch_to.active_element.get_attribute("aria-expanded") == "true"
    opened.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    assert detail(opened).startswith(f"{ORIGIN}.gate_proj")
    opened.switch_to.active_element.send_keys(",", ",")
    assert opened.find_element(By.CSS_SELECTOR, ".tools strong").text == str(BROKEN_AT - 2)
    opened.switch_to.active_element.send_keys(Keys.HOME)
    assert opened.switch_to.active_element == rows(opened)[0]
    opened.switch_to.active_element.send_keys("/")
    assert opened.switch_to.active_element.get_attribute("type") == "search"
    assert len([row for row in rows(opened) if row.get_attribute("tabindex") == "0"]) == 1


def test_hostile_names_are_texts(opened: webdriver.Chrome) -> None:
    """A module named like markup is shown letter by letter and makes no element."""
    assert not opened.find_elements(By.CSS_SELECTOR, ".rows img, .detail img, .row b > *")
    assert opened.find_element(By.CSS_SELECTOR, "input[type=search]").is_displayed()
    opened.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("onerror")
    shown = rows(opened)[-1]
    shown.click()
    assert detail(opened).startswith(HOSTILE.replace("\u202e", "\\u202e"))
    assert not opened.find_elements(By.CSS_SELECTOR, ".detail img, .detail b")


FAINT = (Path(__file__).parent / "faint_texts.js").read_text(encoding="utf-8")


@pytest.mark.release
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("typed", ["", "gate_proj"])
def test_every_text_can_be_read(opened: webdriver.Chrome, scheme: str, typed: str) -> None:
    """The contrast that WCAG 2.2 asks for (AA), in both schemes: with the origin selected, and beside what a filter leaves."""
    opened.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    opened.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys(typed)
    opened.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")  # type: ignore[no-untyped-call]
    measured = opened.execute_script(FAINT)  # type: ignore[no-untyped-call]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert measured["texts"] > 100
    assert measured["faint"] == []


@pytest.mark.release
def test_a_large_model_opens(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Four hundred modules over fifty steps: at most 2 MB, and every module can be opened."""
    page = render(large_run(tmp_path / "large", Shape(modules=400, steps=50)))
    assert page.stat().st_size <= 2_000_000
    browser.get(page.as_uri())
    assert browser.find_element(By.CSS_SELECTOR, ".count").text == "396 of 396 modules"
    search = browser.find_element(By.CSS_SELECTOR, "input[type=search]")
    search.send_keys(".")
    assert len(rows(browser)) > 390
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def axe_core() -> Path | None:
    """The file that ``npm install axe-core`` brings: named by AXE_CORE, or in a folder ``node_modules`` above this file."""
    named = os.environ.get("AXE_CORE")
    near = [folder / "node_modules" / "axe-core" / "axe.min.js" for folder in Path(__file__).resolve().parents]
    return Path(named) if named else next((file for file in near if file.is_file()), None)


needs_axe = pytest.mark.skipif(
    axe_core() is None, reason="axe-core is not installed: npm install axe-core, or AXE_CORE=axe.min.js"
)


@contextmanager
def emulated(browser: webdriver.Chrome, columns: int, scheme: str) -> Iterator[None]:
    """A window of that width and color scheme, in which scripts of a test may run beside those of the page."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": columns, "height": 1200, "deviceScaleFactor": 1, "mobile": columns < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def violations(browser: webdriver.Chrome) -> list[list[str]]:
    """What axe-core objects to in the page or frame that is shown, with everything unfolded."""
    file = axe_core()
    assert file is not None
    browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")  # type: ignore[no-untyped-call]
    browser.execute_script(file.read_text(encoding="utf-8"))  # type: ignore[no-untyped-call]
    run = "axe.run({iframes: false}).then((r) => done(r.violations.map((v) => [v.id, v.nodes[0].html])))"
    return list(browser.execute_async_script(f"const done = arguments[0]; {run}"))  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A page of every kind."""
    return every_kind(tmp_path_factory.mktemp("kinds"))


@pytest.mark.release(all_but=1)
@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("columns", [390, 500, 1440])
def test_axe_finds_nothing(browser: webdriver.Chrome, kinds: list[Path], scheme: str, columns: int) -> None:
    """Pages of every kind: runs with each view of their modules, a matrix, a bisection, a comparison, an inspection, the environment."""
    with emulated(browser, columns, scheme):
        for page in kinds:
            browser.get(page.as_uri())
            assert browser.find_element(By.TAG_NAME, "h1").text
            assert violations(browser) == [], page
            assert browser.execute_script("return document.documentElement.scrollWidth") <= columns, page  # type: ignore[no-untyped-call]


@pytest.mark.release
@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_a_notebook(browser: webdriver.Chrome, tmp_path: Path, scheme: str) -> None:
    """The frame that a notebook shows, and what is in it, in a window of 500 pixels."""
    with emulated(browser, 500, scheme):
        browser.get(notebook(tmp_path).as_uri())
        assert violations(browser) == []
        browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
        assert browser.find_element(By.TAG_NAME, "h1").text
        assert violations(browser) == []
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")  # type: ignore[no-untyped-call]


def shown(browser: webdriver.Chrome, page: Path, anchor: str) -> WebElement:
    """The element that an address names, after the page was opened there."""
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#{quote(anchor)}")
    return browser.find_element(By.ID, anchor)


def test_a_link_opens_at_what_it_names(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """A module whose container is closed, a finding that is folded away, a fix: each is in view, and each can be copied as a link."""
    page = render(mismatched_run(tmp_path / "run"))
    for anchor in (
        f"module-0:{REJECTS}",
        "finding-norm-promotes-to-float32",
        "finding-operand-dtype-mismatch",
        "fix-cast-at-lora-input",
    ):
        found = shown(browser, page, anchor)
        assert found.is_displayed(), anchor
        inside = "const r = arguments[0].getBoundingClientRect(); return r.top >= 0 && r.bottom <= innerHeight"
        assert browser.execute_script(inside, found), anchor  # type: ignore[no-untyped-call]
        link = browser.find_element(
            By.CSS_SELECTOR, f"a.anchor[href='#{quote(anchor, safe='')}'], a.anchor[href='#{quote(anchor)}']"
        )
        assert str(link.get_attribute("href")).startswith(page.as_uri())
    assert selected(browser).get_attribute("id") == f"module-0:{PROMOTES}"
    shown(browser, page, f"module-0:{REJECTS}")
    assert selected(browser).get_attribute("id") == f"module-0:{REJECTS}"
