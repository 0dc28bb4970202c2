"""The HTML report in a real browser, opened from disk as a maintainer would."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_pages import every_kind
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")


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


def test_pages_of_every_kind_open_without_errors(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Nothing is written to the console, the verdict is the heading, nothing is wider than a phone, and a link unfolds what it names."""
    metrics = {"width": 390, "height": 1200, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    pages = every_kind(tmp_path)
    for page in pages:
        browser.get(page.as_uri())
        assert browser.find_element(By.TAG_NAME, "h1").is_displayed(), page
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, page  # type: ignore[no-untyped-call]
    overflow, mismatch = pages[:2]
    browser.get(overflow.as_uri())
    assert browser.find_element(By.TAG_NAME, "h1").text == "float16 overflows in layers.1.mlp at step 14."
    browser.get(f"{mismatch.as_uri()}#finding-operand-dtype-mismatch")
    assert browser.find_element(By.CSS_SELECTOR, "details:has(:target)").get_attribute("open") is not None
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
