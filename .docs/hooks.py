"""Adds to the site what lies elsewhere: READMEs, pictures, and the settings as ``--help`` prints them.

Links are written as paths of the repository, so that they work there too; the site has other paths::

    .docs/pages/guide.md  ->  guide.md              README.md         ->  README.md, the first page
    .github/SECURITY.md   ->  github/SECURITY.md    actors/README.md  ->  actors/README.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = ".docs/pages/"
ADDED = (
    "README.md",
    "CHANGELOG.md",
    ".github/*.md",
    ".github/*.png",
    "environments/**/README.md",
    "policies/**/README.md",
    "actors/**/README.md",
    "launch/**/README.md",
    "tests/benchmarks/README.md",
)
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
SETTINGS = """\
# Settings

What `python -m launch.train --help` prints. The other commands take those of these settings that they act on.

```text
{}
```
"""

_paths: dict[str, str] = {}
"""Path in the repository of each page that lies outside of ``PAGES``, by its path on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of the folder of pages."""
    for pattern in ADDED:
        for source in sorted(REPOSITORY.glob(pattern)):
            path = source.relative_to(REPOSITORY).as_posix()
            _paths[_on_site(path)] = path
            files.append(File.generated(config, _on_site(path), abs_src_path=str(source)))
    command = [sys.executable, "-m", "launch.train", "--help"]
    printed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    files.append(File.generated(config, "settings.md", content=SETTINGS.format(printed.stdout.strip())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between paths of the repository into links between paths of the site."""
    here = page.file.src_uri
    folder = os.path.dirname(_paths.get(here, PAGES + here))

    def of_site(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(folder, link[1]))
        path = os.path.join(path, "README.md") if (REPOSITORY / path).is_dir() else path
        there = _on_site(path)
        return os.path.relpath(there, os.path.dirname(here)) if there in files.src_uris else link[1]

    return LINK.sub(of_site, markdown)


def _on_site(path: str) -> str:
    return path.removeprefix(PAGES).removeprefix(".")
