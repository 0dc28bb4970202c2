"""The HTML report in a real browser, opened from disk as a maintainer would."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
from command import dtypedoctor
from recorded import run_directory

pytest.importorskip("selenium", reason="needs the extra dtypedoctor[release]")
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from dtypedoctor.diagnosis.checkpoint import StaticTensor, Subject
from dtypedoctor.lab.cli.matrix import matrix_document, row_of
from dtypedoctor.report.files import read_report
from dtypedoctor.report.run_document import bisection_document
from dtypedoctor.report.surveys import Inspection, inspection_document
from dtypedoctor.report.to_html import render_html

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")


HOSTILE = "model.</script><img src=x onerror=alert(1)>\u202e"
BISECTION = {
    "end": "found",
    "workload": "one forward pass",
    "candidates": 44,
    "culprits": ["model.layers.1.mlp::self"],
    "probes": 14,
    "one_minimal": True,
    "flaky": ["the whole model"],
    "verdicts": [
        {"mode": mode, "workload": "one forward pass", "outcome": outcome, "phase": "forward", "step": 1, "fqn": "model.layers.1.mlp", "absmax": 9e4}
        for mode, outcome in (("one forward pass", "fail"), ("float32", "pass"), ("compiled", "unresolved"))
    ],
    "remedy": {"corrections": [{"id": "keep-float32", "modules": ["model.layers.1.mlp::self"]}]},
    "reproduction": {"script": "repro.py", "bytes": 65920, "said": "FAILS: inf"},
}  # fmt: skip


def render(directory: Path) -> Path:
    """Renders a run directory through the command line."""
    done = dtypedoctor("report", directory, "--format", "html")
    assert done.code == 0, done.err
    page = directory / "report.html"
    page.write_text(done.out, encoding="utf-8")
    return page


def every_kind(folder: Path) -> list[Path]:
    """The pages of runs with findings, of a healthy one, a matrix, a bisection, a comparison, an inspection and the environment."""
    runs = [
        run_directory("gemma4_grpo_fp16", folder / "overflow", ("model.layers.0.mlp", HOSTILE)),
        run_directory("divergence_learning_rate_30", folder / "divergence"),
        run_directory("healthy_zero_embedding_gradients", folder / "healthy"),
    ]
    reports = [read_report(run) for run in runs]
    rows = [row_of(report, exit_code=10, seconds=1.0, path="report.json") for report in reports]
    tensors = tuple(
        StaticTensor(name=f"layers.{i}.weight", dtype=dtype, shape=(4, 4))
        for i, dtype in enumerate(("float16", "float32"))
    )
    inspected = Inspection(subject=Subject(name="checkpoint", tensors=tensors), findings=reports[0].findings)
    documents = {
        "matrix": matrix_document(rows, reports, exit_code=10),
        "bisection": bisection_document(replace(reports[0], bisection=BISECTION)),
        "inspection": inspection_document(inspected),
    }
    pages = {name: render_html(document) for name, document in documents.items()}
    pages["comparison"] = dtypedoctor("compare", runs[0], runs[1], "--format", "html").out
    pages["environment"] = dtypedoctor("env", "--format", "html").out
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return [*map(render, runs), *(folder / f"{name}.html" for name in pages)]


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
    """Nothing is written to the console, whatever a module is called; the verdict is the heading, and nothing is wider than a phone."""
    metrics = {"width": 390, "height": 1200, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    pages = every_kind(tmp_path)
    for page in pages:
        browser.get(page.as_uri())
        assert browser.find_element(By.TAG_NAME, "h1").is_displayed(), page
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, page  # type: ignore[no-untyped-call]
    browser.get(pages[1].as_uri())
    assert browser.find_element(By.TAG_NAME, "h1").text == read_report(pages[1].parent).headline
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


@pytest.mark.release
def test_axe_has_nothing_to_say_against_any_page(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Neither on a phone nor on a desk, in light or dark colors."""
    package = find_spec("axe_core_python")
    if package is None or package.origin is None:
        pytest.skip("needs the extra dtypedoctor[release]")
    axe = Path(package.origin).with_name("axe.min.js").read_text(encoding="utf-8")
    pages = every_kind(tmp_path)
    for scheme, width in product(("light", "dark"), (390, 1440)):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for page in pages:
            browser.get(page.as_uri())
            browser.execute_script(axe)  # type: ignore[no-untyped-call]
            told = browser.execute_async_script("axe.run(document).then(arguments[0])")  # type: ignore[no-untyped-call]
            assert told["passes"]
            violations = [(rule["id"], rule["nodes"][0]["html"]) for rule in told["violations"]]
            assert violations == [], (page, scheme, width)
