"""Makes the images of the documentation from real runs: ``python tools/screenshots.py [RUN]``; needs Chromium and its driver.

The script of ``docs/your-own-script.md`` is run by ``dtypedoctor exec``, in a folder of its own, and what it prints is drawn for terminals of three
widths, in a notebook, as GitHub draws Markdown, and as a recording of the prompt. The page comes from RUN, a finished run of
``scenarios/gemma4_grpo_fp16.yaml``, which is run if none is named. Everything goes to ``docs/images``.
"""

import base64
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import nbclient
import nbformat
from markdown_it import MarkdownIt
from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.files import read_report
from dtypedoctor.report.first_screen import print_first_screen

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SCRIPT = re.search(r"```python\n(import torch.*?)```", (ROOT / "docs/your-own-script.md").read_text(), re.DOTALL)
COMMAND = "dtypedoctor exec train.py"
SCENARIO = ROOT / "scenarios" / "gemma4_grpo_fp16.yaml"
WIDTHS = (60, 100, 200)

GITHUB = """
body { font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; color: #1f2328; max-width: 900px; margin: 24px auto; padding: 0 32px; }
table { border-collapse: collapse; display: block; overflow: auto; margin: 0 0 16px; } th, td { border: 1px solid #d1d9e0; padding: 6px 13px; }
tr:nth-child(2n) { background: #f6f8fa; } h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: .3em; }
pre { background: #f6f8fa; border-radius: 6px; padding: 16px; overflow: auto; font-size: 85%; } code { font-family: "DejaVu Sans Mono", monospace; font-size: 85%; }
:not(pre) > code { background: #eff1f3; border-radius: 6px; padding: .2em .4em; } pre code { font-size: 100%; }
"""
"""How GitHub draws Markdown, as far as reports use it."""

NOTEBOOK = """
body { font: 14px/1.5 "DejaVu Sans", sans-serif; margin: 16px 24px; max-width: 1100px; color: #1b2530; }
.cell { display: grid; grid-template-columns: 64px 1fr; margin: 8px 0; } .prompt { color: #307fc1; font: 12px "DejaVu Sans Mono", monospace; padding-top: 8px; }
pre { font: 13px "DejaVu Sans Mono", monospace; margin: 0; padding: 8px; white-space: pre-wrap; } .input pre { background: #f5f5f5; border: 1px solid #e0e0e0; }
"""

CELL = """%%doctor
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.Linear(64, 64).half()
hidden = layer(torch.randn(8, 64).half() * 3000)
scores = nn.Softmax(-1)(hidden * hidden)
scores.isfinite().all()"""
CELLS = ("%load_ext dtypedoctor", CELL)


def drawn(lines: str, columns: int, title: str) -> str:
    """Text with the codes of a terminal as SVG that loads nothing."""
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(Text.from_ansi(lines))
    picture = console.export_svg(title=title, unique_id="dtypedoctor")
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)


def screen_at(run: Path, columns: int) -> str:
    """What a terminal of this width shows when the run has ended."""
    written = io.StringIO()
    console = Console(file=written, width=columns, force_terminal=True, color_system="standard", highlight=False)
    print_first_screen(redact(read_report(run)), console, run.name, ["report.html", "report.md", "report.json"])
    return written.getvalue()


def recording(run: Path, said: str) -> str:
    """The prompt, what the script prints, and the first screen, one after the other."""
    report = screen_at(run, 100).splitlines()
    lines = [f"$ {COMMAND}", *said.splitlines(), *report]
    picture = drawn("\n".join(lines), 100, COMMAND)
    seconds = [0.3, *(1.6 + 0.25 * at for at in range(len(said.splitlines())))]
    seconds += [seconds[-1] + 0.9 + 0.06 * at for at in range(len(report))]

    def begun(found: re.Match[str]) -> str:
        return f'{found[0]} style="animation-delay:{seconds[min(int(found[1]), len(seconds) - 1)]:.2f}s"'

    animated = re.sub(r'clip-path="url\(#dtypedoctor-line-(\d+)\)"', begun, picture)
    look = (
        "@keyframes begin { to { opacity: 1 } } text[style] { opacity: 0; animation: begin 0s forwards }"
        "@media (prefers-reduced-motion: reduce) { text[style] { opacity: 1; animation: none } }"
    )
    return animated.replace("</style>", f"{look}</style>", 1)


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser without a window."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        yield browser
    finally:
        browser.quit()


def shoot(
    browser: webdriver.Chrome,
    page: Path,
    name: str,
    size: tuple[int, int],
    *,
    scheme: str = "light",
    media: str = "",
    scale: float = 0.7,
    hidden: str = "",
) -> None:
    """Draws the upper part of a page, ``size`` pixels of it, without the elements that the selector ``hidden`` finds."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": size[0] < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    if hidden:
        browser.execute_script("document.querySelectorAll(arguments[0]).forEach((e) => e.remove())", hidden)
    if media == "print":
        browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": False})
    (IMAGES / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def notebook(folder: Path) -> Path:
    """A notebook that has been run, as a page."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    parts = []
    for number, cell in enumerate(book.cells, 1):
        escaped = cell.source.replace("&", "&amp;").replace("<", "&lt;")
        parts.append(f'<div class="cell input"><div class="prompt">[{number}]:</div><pre>{escaped}</pre></div>')
        for output in cell.outputs:
            data = output.get("data", {})
            shown = data.get("text/html") or f"<pre>{data.get('text/plain') or output.get('text', '')}</pre>"
            parts.append(f'<div class="cell"><div class="prompt"></div><div>{shown}</div></div>')
    page = folder / "notebook.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><style>{NOTEBOOK}</style>{''.join(parts)}", encoding="utf-8")
    return page


def as_on_github(markdown: Path) -> Path:
    """A report in Markdown as GitHub draws it."""
    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown.read_text(encoding="utf-8"))
    page = markdown.with_name("github.html")
    page.write_text(f"<!doctype html><meta charset=utf-8><style>{GITHUB}</style>{body}", encoding="utf-8")
    return page


def run_script(folder: Path) -> tuple[Path, str]:
    """Runs the documented script; its run directory, and what it printed itself."""
    assert SCRIPT is not None
    (folder / "train.py").write_text(SCRIPT[1], encoding="utf-8")
    command = [sys.executable, "-m", "dtypedoctor", "exec", "--out", "run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    return folder / "run", done.stdout


def scenario_run(folder: Path) -> Path:
    """Runs the scenario whose page is shown."""
    command = [sys.executable, "-m", "dtypedoctor", "run", str(SCENARIO), "--out", str(folder / "gemma")]
    subprocess.run(command, cwd=folder, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder / "gemma"


def main(run: Path | None) -> None:
    """Makes every image."""
    with TemporaryDirectory() as place, chromium() as browser:
        folder = Path(place)
        script, said = run_script(folder)
        for width in WIDTHS:
            (IMAGES / f"terminal-{width}.svg").write_text(
                drawn(screen_at(script, width), width, COMMAND), encoding="utf-8"
            )
        (IMAGES / "recording.svg").write_text(recording(script, said), encoding="utf-8")
        run = run or scenario_run(folder)
        title = "dtypedoctor run gemma4_grpo_fp16"
        (IMAGES / "terminal-gemma4.svg").write_text(drawn(screen_at(run, 100), 100, title), encoding="utf-8")
        page = run / "report.html"
        shoot(browser, page, "report-light", (1440, 1900), hidden="#compare")
        shoot(browser, page, "report-dark", (1440, 1900), scheme="dark", hidden="#compare")
        shoot(browser, page, "report-phone", (390, 1500), scale=1)
        shoot(browser, page, "report-print", (800, 1400), media="print", scale=0.8)
        shoot(browser, as_on_github(script / "report.md"), "issue", (960, 1500), scale=0.75)
        shoot(browser, notebook(folder), "notebook", (1100, 820), scale=0.75)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if sys.argv[1:] else None)
