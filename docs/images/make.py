"""Makes the pictures of the README from a finished run: ``python docs/images/make.py RUN``.

``terminal.svg`` is what the prompt shows, down to the before/after table; ``report.png`` is the HTML page in Chromium, without
that table, so that verdict and heat map fit into one picture.
"""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.files import read_report
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_terminal import print_document

HERE = Path(__file__).parent
COLUMNS = 100
PAGE = (1200, 1720)
"""Pixels of the browser's window."""
SHARE = 0.62
"""Of the window's size, in the picture."""


def terminal(run: Path) -> str:
    """The report at a prompt of :data:`COLUMNS` columns as SVG that loads nothing."""
    written = io.StringIO()
    report = redact(read_report(run))
    print_document(
        run_document(report), Console(file=written, width=COLUMNS, force_terminal=True, color_system="standard")
    )
    shown = re.split(r"\n[^\n]*Baseline and fixes", written.getvalue())[0].rstrip()
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown))
    drawn = console.export_svg(title=f"dtypedoctor run {report.name}", unique_id="dtypedoctor")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)


def page(run: Path, target: Path) -> None:
    """Verdict, remedies and heat map of the HTML page as PNG."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        command = [sys.executable, "-m", "dtypedoctor", "report", str(run), "--format", "html"]
        file.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout, encoding="utf-8")
        browser = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        size = {"width": PAGE[0], "height": PAGE[1], "deviceScaleFactor": SHARE, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(file.as_uri())
        browser.execute_script("document.querySelector('#compare').remove()")
        browser.save_screenshot(str(target))
        browser.quit()


if __name__ == "__main__":
    (HERE / "terminal.svg").write_text(terminal(Path(sys.argv[1])), encoding="utf-8")
    page(Path(sys.argv[1]), HERE / "report.png")
