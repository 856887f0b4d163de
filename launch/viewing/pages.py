"""The page of ``launch.view``: the contents of a run's folder, as JSON for one HTML file. It only reads."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from actors.serving.events import EVENTS, event
from environments.data.trajectory_json import Json, plain_json
from environments.errors import ConfigError, TroupeError
from environments.prefix_tree import Repeats
from environments.steps import share
from environments.types import Completion, Trajectory
from launch.reporting.tracker import ALARMS, METRICS, SETTINGS, read_metrics, read_settings
from launch.run_folder.jsonl_log import read_records
from launch.run_folder.model_paths import token_texts
from launch.run_folder.trajectory_log import (
    EVALUATION,
    TRAIN,
    KeptTrajectory,
    find_task,
    kept_steps,
    read_kept,
    trajectory_path,
)
from launch.viewing.talk import Talk

Kind = Literal["step", "eval"]

FILES = Path(__file__).parent
PAGE_FILES = ("page.html", "elements.js", "charts.js", "page.js", "page.css")
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names under which a browser of this machine asks: another may be a foreign page's trick (DNS rebinding)."""
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
"""Policy of the browser: a model's text may hold anything, so only the page's own files run and load."""
REFRESH_SECONDS = 1.0
TASK_CHARACTERS = 200
MAX_ALARMS = 50
STATUS_COMMAND = (sys.executable, "-m", "launch.status", "--json", "--every", "2")
MAX_LINE_BYTES = 1 << 24
"""Bytes of one state: some hundred for each process and each rollout in play."""


class Pages:
    """Routes of the page. A run has its number, a trajectory its row in the file.

    Args:
        runs: folders of training runs.
        address: of the cluster where they go on; ``None`` finds it as ``launch.status`` does.
    """

    def __init__(self, runs: Sequence[Path], address: str | None) -> None:
        self._runs, self._address = list(runs), address

    def file(self, name: str = "page.html") -> FileResponse:
        """The page itself, its script or its style."""
        if name not in PAGE_FILES:
            raise HTTPException(404, f"There is no {name!r}.")
        return FileResponse(FILES / name)

    def names(self) -> list[str]:
        """The folders of the runs."""
        return [str(each) for each in self._runs]

    def overview(self, number: int, after: int = 0, file: str = "") -> Json:
        """The metrics from line ``after`` of ``file`` on, the newest alarms, and the steps with trajectories.

        A resumed run makes a new file, from which updates are gone: of that, all lines are sent.
        """
        run = self._run(number)
        path = run / METRICS
        present = str(path.stat().st_ino) if path.exists() else ""
        records = read_metrics(run)[after if file == present else 0 :]
        steps = {kind: kept_steps(run, kind) for kind in (TRAIN, EVALUATION)}
        alarms = read_records(run / ALARMS)[-MAX_ALARMS:]
        return {"records": plain_json(records), "file": present, "alarms": alarms, "steps": steps}

    def settings(self, number: int) -> PlainTextResponse:
        """The settings of a run; empty for a folder without."""
        run = self._run(number)
        try:
            return PlainTextResponse(read_settings(run)[0] if (run / SETTINGS).exists() else "")
        except ConfigError as error:
            return PlainTextResponse(str(error))

    async def actors(self, number: int) -> StreamingResponse:
        """Server-sent events: the state of a run that goes on, every two seconds."""
        found = states(self._run(number), self._address)
        return StreamingResponse((event(state) async for state in found), media_type=EVENTS)

    async def changes(self, number: int) -> StreamingResponse:
        """Server-sent events: one for each change of the run's folder."""
        return StreamingResponse(_changes(self._run(number)), media_type=EVENTS)

    def groups(self, number: int, kind: Kind, step: int) -> list[Json]:
        """The groups of an update or an evaluation, with a summary of each member."""
        return _groups(_kept(self._run(number), kind, step))

    def trajectory(self, number: int, kind: Kind, step: int, row: int) -> Json:
        """Trajectory, turn by turn."""
        return _details(self._row(number, kind, step, row), self._run(number))

    def same_task(self, number: int, kind: Kind, step: int, row: int) -> list[Json]:
        """The trajectories of the same task in all updates and evaluations."""
        task = plain_json(self._row(number, kind, step, row).trajectory.task)
        return find_task(self._run(number), task)

    def _row(self, number: int, kind: Kind, step: int, row: int) -> KeptTrajectory:
        kept = _kept(self._run(number), kind, step)
        if not 0 <= row < len(kept):
            raise HTTPException(404, f"There are {len(kept)} trajectories.")
        return kept[row]

    def _run(self, number: int) -> Path:
        if not 0 <= number < len(self._runs):
            raise HTTPException(404, f"There are {len(self._runs)} runs.")
        return self._runs[number]


def application(
    runs: Sequence[Path], address: str | None = None, server: str = "http://127.0.0.1:8000/v1"
) -> FastAPI:
    """The web application that shows ``runs``.

    Args:
        runs, address: see ``Pages``.
        server: the address of the policy server to talk to.
    """
    app = FastAPI(title="Troupe's runs", docs_url=None, redoc_url=None, openapi_url=None)
    pages, talk = Pages(runs, address), Talk(server)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))
    app.middleware("http")(_restrict)
    app.exception_handler(TroupeError)(_explain)
    app.get("/api/runs")(pages.names)
    app.get("/api/runs/{number}")(pages.overview)
    app.get("/api/runs/{number}/changes")(pages.changes)
    app.get("/api/runs/{number}/settings")(pages.settings)
    app.get("/api/runs/{number}/actors")(pages.actors)
    app.get("/api/runs/{number}/{kind}/{step}")(pages.groups)
    app.get("/api/runs/{number}/{kind}/{step}/{row}")(pages.trajectory)
    app.get("/api/runs/{number}/{kind}/{step}/{row}/same")(pages.same_task)
    app.get("/api/models")(talk.models)
    app.post("/api/talk")(talk.talk)
    app.post("/api/feedback")(talk.give_feedback)
    app.get("/")(pages.file)
    app.get("/{name}")(pages.file)
    return app


async def _restrict(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "none")  # a browser's word; other programs send none
    detail = None
    if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
        detail = f"{origin} may not ask here."
    elif site not in ("same-origin", "none"):  # an image or a link of a foreign page has no origin
        detail = f"A page of another site ({site}) may not ask here: open the address itself."
    response = JSONResponse({"detail": detail}, 403) if detail else await call_next(request)
    response.headers["content-security-policy"] = POLICY
    response.headers["x-content-type-options"] = "nosniff"
    response.headers["cache-control"] = "no-store"
    return response


async def _explain(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=404)


def _kept(directory: Path, kind: str, step: int) -> list[KeptTrajectory]:
    path = trajectory_path(directory, kind, step)
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return _read(directory, kind, step, changed)


@lru_cache(maxsize=8)
def _read(directory: Path, kind: str, step: int, changed: int) -> list[KeptTrajectory]:
    """``read_kept``, once for each state of the file."""
    return read_kept(directory, kind, step)


def _groups(kept: Sequence[KeptTrajectory]) -> list[Json]:
    """A step's groups with a summary of each member; ``row`` finds it again."""
    groups: dict[str, Json] = {}
    for row, each in enumerate(kept):
        trajectory = each.trajectory
        task = json.dumps(plain_json(trajectory.task), ensure_ascii=False)[:TASK_CHARACTERS]
        group = groups.setdefault(each.group_id, {"id": each.group_id, "task": task, "members": []})
        group["members"].append(
            {
                **each.facts(),
                "row": row,
                "turns": len(trajectory.steps),
                "fork": _fork(trajectory),
                "tokens": trajectory.num_sampled_tokens,
                "error": (trajectory.error or "").split("\n")[0],
            }
        )
    return list(groups.values())


def _fork(trajectory: Trajectory) -> str:
    shared = trajectory.num_shared_turns
    return f", {shared} of them sampled for member {trajectory.forked_from}" if shared else ""


def _details(kept: KeptTrajectory, directory: Path) -> Json:
    """Trajectory, turn by turn: the new messages of the conversation, and the tokens that were sampled."""
    trajectory = kept.trajectory
    decode, conversations = token_texts(directory), Repeats()
    turns = []
    for index, step in enumerate(share(trajectory.steps)):
        completion, conversation = step.completion or Completion(text="", finish_reason=""), step.conversation
        assert conversation is not None  # since the steps are shared
        _, num_repeated = conversations.longest(conversation.span)
        conversations.add(index, conversation.span)
        turns.append(
            {
                "messages": conversation.after(num_repeated),
                "text": step.model_response,
                "reward": step.reward,
                "advantage": kept.advantages[index] if index < len(kept.advantages) else None,
                "tokens": [decode(token_id) for token_id in completion.completion_ids],
                "logprobs": completion.logprobs,
                "versions": completion.token_versions,
            }
        )
    return {
        **kept.facts(),
        "task": trajectory.task,
        "metrics": trajectory.metrics,
        "turns": turns,
    }


async def _changes(directory: Path) -> AsyncIterator[str]:
    """An event whenever there is something new, and a comment in between: it keeps the line open."""
    seen: tuple[int, int] | None = None
    while True:
        metrics = directory / METRICS
        present = (
            metrics.stat().st_size if metrics.exists() else 0,
            sum(len(kept_steps(directory, kind)) for kind in (TRAIN, EVALUATION)),
        )
        yield "data: changed\n\n" if present != seen else ": nothing new\n\n"
        seen = present
        await asyncio.sleep(REFRESH_SECONDS)


async def states(run: Path, address: str | None) -> AsyncIterator[Json]:
    """The state of ``run`` every two seconds, as ``{"state": ...}``; at the end why there is none any more.

    ``launch.status`` watches the run in a process of its own: Ray ends every process whose cluster has gone,
    and the page outlives the run.

    Args:
        run: its folder.
        address: of its cluster; ``None`` finds it as ``launch.status`` does.
    """
    where = [] if address is None else ["--address", address]
    process = await asyncio.create_subprocess_exec(
        *STATUS_COMMAND, *where, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_LINE_BYTES
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async for line in process.stdout:
            runs = json.loads(line)["runs"]
            here = [each for each in runs if Path(each["folder"]) == run.resolve()]
            if not here:
                yield {"end": _not_here(run, [each["folder"] for each in runs])}
                return
            yield {"state": here[0]}
        errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        yield {"end": errors[-1] if errors else "The cluster of the run has ended."}
    finally:  # the page is left
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _not_here(run: Path, others: Sequence[str]) -> str:
    those = f"Others are: {', '.join(others)}." if others else "No other training is either."
    return f"{run} is not going on in this cluster. {those}"
