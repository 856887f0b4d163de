"""``python -m launch.view runs/a``: look at runs in the browser, finished ones and those under way.

    python -m launch.view                  the newest run in runs/
    python -m launch.view runs/a runs/b    several, over each other

Curves, the groups of every update, each trajectory turn by turn, what the actors of a run wait for, and a
talk with a model that is served (TROUPE_API_KEY is its key). It listens on this machine only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from environments.chat_endpoint import is_web_address
from environments.command_name import command_parser, explained
from environments.errors import ConfigError
from launch.reporting.tracker import METRICS
from launch.run_folder.model_paths import RUNS
from launch.run_folder.trajectory_log import FOLDER
from launch.validation.serving import DEFAULT_PORT, check_address

PORT = 8010
HOST = "127.0.0.1"
SERVER = f"http://127.0.0.1:{DEFAULT_PORT}/v1"


def run_folders(given: Sequence[str]) -> list[Path]:
    """The folders to show: those that were given, or the newest run.

    Raises:
        ConfigError: one is no run's folder, or there is no run.
    """
    if not given:
        found = [path.parent for path in RUNS.glob(f"*/{METRICS}")]
        if not found:
            raise ConfigError(f"{RUNS}/ holds no run: run `make train` first, or name a run's folder.")
        return [max(found, key=lambda folder: (folder / METRICS).stat().st_mtime)]
    folders = [Path(name) for name in given]
    for folder in folders:
        if not (folder / METRICS).is_file() and not (folder / FOLDER).is_dir():
            raise ConfigError(f"{folder} is no run's folder: it holds neither {METRICS} nor {FOLDER}/.")
    return folders


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = command_parser("view", __doc__)
    parser.add_argument("runs", nargs="*", help="folders of runs")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--address", help="HOST:PORT of the cluster where they run, if several are here")
    parser.add_argument("--server", default=SERVER, help="address of the policy server to talk to")
    options = parser.parse_args(arguments)
    folders = run_folders(options.runs)
    check_address(HOST, options.port, "--port ")
    if not is_web_address(options.server):
        raise ConfigError(f"--server {options.server} is no address of a server: write {SERVER}.")
    import uvicorn

    from launch.viewing.pages import application

    sys.stdout.write(f"{', '.join(map(str, folders))}: http://{HOST}:{options.port}/ (Ctrl-C ends it)\n")
    sys.stdout.flush()
    app = application(folders, options.address, options.server)
    uvicorn.run(app, host=HOST, port=options.port, log_level="critical", timeout_graceful_shutdown=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
