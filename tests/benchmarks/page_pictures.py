"""Takes the pictures of the page of ``launch.view`` that README shows, with a real Chromium.

    python tests/benchmarks/page_pictures.py runs/shop --out .github

A run that is over has no actors; its views of the run, of a step's groups and of a trajectory are taken.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import repository

sys.path.insert(0, str(Path(repository.__file__).resolve().parents[1]))
from browser import Browser

WIDTH, HEIGHT = 1180, 640


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "launch.view", str(options.run), "--port", str(port)]
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view,
        Browser.running(Path(profile)) as browser,
    ):
        assert view.stdout is not None and "http" in view.stdout.readline()
        browser.resize(WIDTH, HEIGHT)
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait_for("document.querySelectorAll('.chart').length >= 5")
        browser.screenshot(options.out / "page_run.png")
        browser.press("2")
        browser.wait_for("document.querySelectorAll('.cell').length > 8")
        browser.screenshot(options.out / "page_groups.png")
        # A member of a group in which some succeed and others do not, beside one with another reward.
        browser.value("""(() => {
            const group = state.groups.find(
                (each) => new Set(each.members.map((one) => one.reward)).size > 1);
            const [low, high] = [...group.members].sort((one, other) => one.reward - other.reward).filter(
                (each, index, all) => index === 0 || index === all.length - 1);
            go({ page: "trajectory", row: high.row, beside: low.row });
        })()""")
        browser.wait_for("document.querySelectorAll('article').length === 2")
        browser.screenshot(options.out / "page_trajectory.png")
        view.terminate()


if __name__ == "__main__":
    main()
