"""Takes the pictures of the page of ``launch.view`` that README shows, with a real Chromium.

    python tests/benchmarks/page_pictures.py runs/shop --out .github

A run that is over has no actors; its views of the run, of a step's groups and of a trajectory are taken.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import repository
from programs import free_port

sys.path.insert(0, str(Path(repository.__file__).resolve().parents[1]))
from browser import Browser

WIDTH, HEIGHT = 1180, 640


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=5, help="the update whose groups are shown")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "launch.view", str(options.run), "--port", str(port)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view,
        Browser.running() as browser,
    ):
        try:
            assert view.stdout is not None and "http" in view.stdout.readline()
            take(browser, f"http://127.0.0.1:{port}/", options.step, options.out)
        finally:
            view.terminate()


def take(browser: Browser, page: str, step: int, folder: Path) -> None:
    browser.resize(WIDTH, HEIGHT)
    browser.open(page)
    browser.wait_for("document.querySelectorAll('.chart').length >= 5")
    browser.screenshot(folder / "page_run.png")
    browser.open(f"{page}#groups/0/step/{step}/0")
    browser.wait_for("document.querySelectorAll('.cell').length > 8")
    # A member of a group in which some succeed and others do not, beside one with another reward.
    browser.value("""(() => {
        const differs = (each) => new Set(each.members.map((one) => one.reward)).size > 1;
        const members = [...state.groups.find(differs).members].sort((one, two) => one.reward - two.reward);
        go({ page: "trajectory", row: members.at(-1).row, beside: members[0].row });
    })()""")
    browser.wait_for("document.querySelectorAll('article').length === 2")
    browser.screenshot(folder / "page_trajectory.png")


if __name__ == "__main__":
    main()
