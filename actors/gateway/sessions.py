"""A server at which programs elsewhere fetch the tasks of a training, and hand in what they have earned.

A program needs nothing of Troupe, only its address and a key. It calls the policy at the node that plays its
rollout::

    program elsewhere                      session server             rollout actor
                                           tasks that wait        <-  RemoteProgram: a task, with the address
    POST /sessions                     ->  the oldest of them         and the key of its rollout
    the task, the address, the key     <-
    POST {address}/chat/completions    --------------------------->   gateway: a turn of the rollout
    POST /sessions/{id}/reward         ->  the reward             ->  the rollout's reward

A program that does not know its reward yet sends {"later": true}, which ends the rollout. The reward that it
sends then is kept in a folder for ``launch.recipes.late_rewards``.

A program that takes an address and a key only calls the policy here, with KEY:NAME for its key or the header
``x-session-id: NAME``. The name, of the program's own choice, stands for one session: the first request that
has it takes a task, all others are of the same, and calls of the policy are passed on to its rollout. Where
the actor of that dies, another one offers the same session again, with all answers up to then, and calls that
have no answer yet are sent there: the program notices nothing. It has no answer that is not kept here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import secrets
import socket
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.gateway.client import unverified
from actors.gateway.entries import ENTRIES_HEADER, Part, SessionJournals
from actors.gateway.server import (
    CALL_HEADER,
    COUNT_PATH,
    DIALECTS,
    RETRY_HEADER,
    application,
    body_of,
    num_retries,
    serve,
    settled,
)
from actors.serving.errors import MODELS_PATH
from actors.serving.keys import KEYS_VARIABLE, ApiKeys, read_keys, sent_keys, unknown_key
from environments.data.late_rewards import LateRewards
from environments.rewards.base import MAX_REWARD, is_reward
from policies.agent_api.context import SESSION_HEADER
from policies.model_api.errors import RequestError

LOST_SECONDS = 120.0
"""Time that a session whose rollout actor is lost waits for another one, and its journal after its end."""
DRIVER_SECONDS = 600.0
"""Time that sessions wait for the next driver after theirs was killed, and then for their task: as long as
the clients of OpenAI and Anthropic wait for an answer.
"""
RESEND_SECONDS = 0.2
"""Time after which a call is sent again whose node has not answered."""
ANSWER_SECONDS = 20.0
"""Time that a program's request waits for a task: less than the proxies between them allow."""
CHECK_SECONDS = 1.0
"""Time within which a request by a name notes that its session has begun, or has ended."""
MAX_NAMES = 10_000
"""Names that are remembered: a program that goes on after its session's end gets no other task."""
NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
RESULT_FIELDS = {"reward", "rewards", "is_correct", "error", "later"}

Json = dict[str, Any]
ENDED: Json = {"failed": "Its session has ended before another actor could go on with it."}
LOST: Json = {"failed": "Its program calls the policy at a node that is lost."}
SILENT = "Its actor was lost, and its program has made no call for {:g} s since, and has sent no reward."
MOVED: Json = {"failed": "Another actor has gone on with its rollout."}


@dataclass(frozen=True, eq=False, slots=True)
class _Driver:
    """A process that trains; see ``Sessions._drive``."""

    keys: ApiKeys
    key: str = ""
    claim_seconds: float = 0.0
    silent_seconds: float = 0.0
    late_rewards: LateRewards = field(default_factory=lambda: LateRewards(Path("late_rewards")))

    @classmethod
    def of(cls, given: Json) -> _Driver:
        """The driver that has sent these fields."""
        keys = {name: bytes.fromhex(digest) for name, digest in given["keys"].items()}
        late_rewards = LateRewards(Path(given["late_rewards"]))
        waits = given["claim_seconds"], given["silent_seconds"]
        return cls(ApiKeys(keys), given["key"], *waits, late_rewards)


@dataclass(eq=False, slots=True)
class _Session:
    """A rollout that waits for a program, and then for its reward."""

    offer: Json
    """The last one: another actor goes on with a rollout whose process has died."""
    driver: _Driver
    """The one whose rollout it is."""
    has_called: bool = True
    """False where its actor was lost, and its program has not called the next one yet."""
    names: list[tuple[str, str]] = field(default_factory=list)
    """Names by which its program calls the policy here, each after that of its key."""
    claimed: asyncio.Future[None] = field(default_factory=asyncio.Future)
    result: asyncio.Future[Json] = field(default_factory=asyncio.Future)
    http: httpx.AsyncClient = field(
        default_factory=partial(httpx.AsyncClient, timeout=None, verify=unverified(), trust_env=False)
    )
    """A client for each session: that of many connections takes longer for each call."""


class Sessions:
    """The sessions of a training, and the application at which programs and rollouts reach them.

    Attributes:
        app: the application.
        ended: set when the training has ended.

    Args:
        driver_key: the key of those that may drive it, one at a time.
    """

    def __init__(self, driver_key: str) -> None:
        self._driver, self._driver_key = _Driver(read_keys(None)), driver_key
        self.ended = threading.Event()
        self._alone_since: float | None = time.monotonic()
        self._open: dict[str, _Session] = {}
        """Sessions by their ids: those that wait for a program, and those that are played."""
        self._ended: dict[str, Json] = {}
        """Results by the ids of their sessions."""
        self._waiting: asyncio.Queue[_Session] = asyncio.Queue()
        """Sessions that wait for a program, and some that are over meanwhile."""
        self._named: dict[tuple[str, str], str] = {}
        """Ids of sessions by the name of the key and the name that their programs have chosen."""
        self._journals = SessionJournals()
        self._orphans: defaultdict[str, list[_Session]] = defaultdict(list)
        """Sessions by their runs and tasks that were played when their driver has died."""
        self._last_request = time.monotonic()
        """The time at which a program has asked for a task the last time."""
        self.app = application(
            [
                *(Route(path, self._pass_on, methods=["POST"]) for path in (*DIALECTS, COUNT_PATH)),
                Route(MODELS_PATH, self._pass_on, methods=["GET"]),
                Route("/driver", self._drive, methods=["POST"]),
                Route("/driver", self._end_all, methods=["DELETE"]),
                Route("/offers", self._offer, methods=["POST"]),
                Route("/offers", self._withdraw, methods=["DELETE"]),
                Route("/offers/{id}", self._move, methods=["GET"]),
                Route("/sessions", self._claim, methods=["POST"]),
                Route("/sessions", self._count, methods=["GET"]),
                Route("/sessions/{id}/reward", self._reward, methods=["POST"]),
            ]
        )

    def alone_seconds(self) -> float:
        """Return the seconds for which no driver has been there."""
        return 0.0 if self._alone_since is None else time.monotonic() - self._alone_since

    async def _drive(self, request: Request) -> ASGIApp:
        """Have the rollouts of a driver in, until its connection ends: it has died then.

        Its body has the ``key`` of its rollouts, the digests of the ``keys`` of programs by their names,
        ``claim_seconds``, ``silent_seconds``, and the folder ``late_rewards``.
        """
        self._check(request, self._driver_key)
        given = await body_of(request)
        if self._alone_since is None or self.ended.is_set():
            raise RequestError("Another training has its programs here.", status=409)
        self._driver = _Driver.of(given)
        self._alone_since = None
        self._orphans.clear()
        for session in list(self._open.values()):
            is_played = session.claimed.done() and not session.result.done()
            if session.offer["run"] and session.names and is_played:
                self._orphans[_task_of(session.offer)].append(session)
                asyncio.get_running_loop().call_later(DRIVER_SECONDS, self._end, session, session.offer)
            else:
                self._end(session, session.offer)

        async def held(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"", "more_body": True})
                with suppress(asyncio.CancelledError):  # the sessions end
                    while (await receive())["type"] != "http.disconnect":
                        pass
                await send({"type": "http.response.body", "body": b""})
            finally:
                self._alone_since = time.monotonic()

        return held

    async def _end_all(self, request: Request) -> Response:
        self._check(request, self._driver_key)
        self.ended.set()
        return Response(status_code=204)

    def _is_orphan(self, session: _Session) -> bool:
        """Return whether the driver of its rollout has died, and no other one has offered its task again."""
        return self._alone_since is not None or session.driver is not self._driver

    def _adopted(self, offer: Json) -> _Session | None:
        """A session whose driver has died: its program plays its task on in the rollout of ``offer``."""
        kept = self._orphans.get(_task_of(offer), [])
        while kept:
            session, id = (first := kept.pop(0)), first.offer["id"]
            if self._open.get(id) is session and not session.result.done():
                del self._open[id]
                self._journals.drop(id)
                session.names.append((session.names[0][0], id))  # by which its program knows it, too
                for name in session.names:
                    self._named[name] = offer["id"]
                session.driver = self._driver
                return session
        return None

    async def _offer(self, request: Request) -> Response:
        """Take the task of a rollout in, and answer when a program has played it."""
        self._check(request, self._driver.key)
        offer = await request.json()
        if offer["id"] in self._ended:  # its actor has died with the result, or came too late
            return JSONResponse(self._ended[offer["id"]])
        if not self._journals.open(offer["id"], offer["attempt"]):
            return JSONResponse(MOVED)
        if (session := self._open.get(offer["id"]) or self._adopted(offer)) is None:
            session = _Session(offer, self._driver)
            self._waiting.put_nowait(session)
        elif session.claimed.done() and not session.result.done() and not session.names:
            self._end(session, session.offer, LOST)
            return JSONResponse(LOST)
        session.offer, session.has_called = offer, not session.claimed.done()
        self._open[offer["id"]] = session
        try:
            seconds = self._driver.claim_seconds
            while not await settled(request, session.claimed, seconds):
                if time.monotonic() - self._last_request >= seconds:  # else they are busy
                    reason = (
                        f"No program has asked for a task for {seconds:g} s: start some that send POST "
                        f"{request.base_url}sessions with a key of {KEYS_VARIABLE}."
                    )
                    self._end(session, offer)
                    return JSONResponse({"failed": reason})
            seconds = self._driver.silent_seconds
            if not await settled(request, session.result, None if session.has_called else seconds):
                if not session.has_called:
                    self._end(session, offer, silent := {"failed": SILENT.format(seconds)})
                    return JSONResponse(silent)
                await settled(request, session.result)
        except RequestError:
            seconds = LOST_SECONDS if session.claimed.done() else 0.0
            asyncio.get_running_loop().call_later(seconds, self._end_lost, session, offer)
            raise
        self._end(session, offer)
        return JSONResponse(session.result.result())

    def _end(self, session: _Session, offer: Json, failure: Json = ENDED) -> None:
        """End a session, unless another actor has gone on with it. One that a program has had never opens
        again: whoever offers it gets the result, or the failure where it has none.
        """
        if session.offer != offer or self._open.pop(offer["id"], None) is None:
            return
        asyncio.get_running_loop().call_later(LOST_SECONDS, self._forget, offer["id"])
        if session.claimed.done():
            self._ended[offer["id"]] = session.result.result() if session.result.done() else failure
            if len(self._ended) > MAX_NAMES:
                del self._ended[next(iter(self._ended))]

    def _forget(self, id: str) -> None:
        if id not in self._open:  # else another actor has offered it anew, since no program had had it
            self._journals.drop(id)

    def _end_lost(self, session: _Session, offer: Json) -> None:
        """End a session whose actor is lost, unless its driver is, too: another one may offer its task."""
        if not session.claimed.done() or not self._is_orphan(session):
            self._end(session, offer)

    async def _move(self, request: Request) -> Response:
        """Send the journal of a session to the actor that goes on with it, and let no other one answer."""
        self._check(request, self._driver.key)
        id = request.path_params["id"]
        self._journals.open(id, int(request.query_params["attempt"]))
        kept = Part(b"", 0, self._journals.of(id))
        return Response(kept.content, headers=kept.headers, media_type="application/octet-stream")

    async def _withdraw(self, request: Request) -> Response:
        """End a session whose rollout has ended without its result, and not with its driver."""
        self._check(request, self._driver.key)
        offer = await request.json()
        if (session := self._open.get(offer["id"])) is not None:
            self._end_lost(session, offer)
        return Response(status_code=204)

    @staticmethod
    def _check(request: Request, key: str) -> None:
        if key not in sent_keys(request.headers):
            raise RequestError(
                "Only this training and its rollouts offer tasks.", status=401, code="invalid_api_key"
            )

    async def _claim(self, request: Request) -> Response:
        """Hand out the task that has waited longest; status 204 says that none waits now."""
        session = await self._session(request, self._sender(request))
        if session is None:
            return Response(status_code=204)
        hidden = ("run", "attempt")
        return JSONResponse({name: value for name, value in session.offer.items() if name not in hidden})

    async def _session(self, request: Request, name: tuple[str, str]) -> _Session | None:
        """The session of a name, which gets a task if it has none; ``None`` where no task waits now."""
        self._last_request = start = time.monotonic()
        while name not in self._named:
            await request.body()
            taking = asyncio.ensure_future(self._waiting.get())
            try:
                seconds = min(CHECK_SECONDS, ANSWER_SECONDS)
                while not await settled(request, taking, seconds) and name not in self._named:
                    if time.monotonic() - start >= ANSWER_SECONDS:
                        return None
            except RequestError:
                if taking.done():
                    self._waiting.put_nowait(taking.result())
                raise
            finally:
                taking.cancel()
            if not taking.done():  # another request has taken a task for the name meanwhile
                break
            session = taking.result()
            if name in self._named:
                self._waiting.put_nowait(session)
            elif self._open.get(session.offer["id"]) is session:
                session.claimed.set_result(None)
                self._remember(name, session)
                return session
        if self._named[name] not in self._open:
            raise RequestError(
                f"Session {name[1]!r} has ended: take another name for the next task.",
                status=404,
                code="session_ended",
            )
        return self._open[self._named[name]]

    def _remember(self, name: tuple[str, str], session: _Session) -> None:
        if len(self._named) >= MAX_NAMES:
            ended = (each for each, id in self._named.items() if id not in self._open)
            self._named.pop(next(ended, name), None)
        if name[1]:
            self._named[name] = session.offer["id"]
            session.names.append(name)

    async def _pass_on(self, request: Request) -> Response:
        """Have the rollout of a named session answer a call of the policy."""
        name = self._sender(request)
        if not name[1]:
            raise RequestError(f"Name the session: send KEY:NAME for the key, or {SESSION_HEADER}: NAME.")
        session = await self._session(request, name)
        if session is None:
            raise RequestError("No task waits for a program now.", status=503, retry_after=1)
        await request.body()  # before its client is waited for
        call = secrets.token_urlsafe(12)
        while (answer := await self._sent(request, session, name, call)) is None:
            await settled(request, asyncio.Future(), RESEND_SECONDS)
            await self._session(request, name)
        return answer

    async def _sent(
        self, request: Request, session: _Session, name: tuple[str, str], call: str
    ) -> Response | None:
        """The answer of the node that plays a session now, which is kept; ``None`` where that is lost.

        Raises:
            RequestError: the client has gone, the session has ended, or no driver has come for its own.
        """
        if self._is_orphan(session):  # its actor ends, and answers with errors until then
            if self.alone_seconds() > DRIVER_SECONDS:
                reason = f"The training was killed, and was not resumed within {DRIVER_SECONDS:g} s."
                raise RequestError(reason, status=410, code="session_ended")
            return None
        session.has_called |= request.method == "POST"  # the list of models may be a check of health
        offer, way = session.offer, session.offer["environment"]
        if not self._journals.is_open(offer["id"], offer["attempt"]):  # another actor is about to offer it
            return None
        sending = session.http.request(
            request.method,
            f"{way['ANTHROPIC_BASE_URL']}{request.url.path}",
            content=await request.body(),
            headers={
                "authorization": f"Bearer {way['OPENAI_API_KEY']}",
                RETRY_HEADER: str(num_retries(request)),
                CALL_HEADER: call,
                ENTRIES_HEADER: str(len(self._journals.of(offer["id"]))),
            },
        )
        calling = asyncio.ensure_future(sending)
        try:
            while not await settled(request, calling, CHECK_SECONDS) and session.offer is offer:
                if not session.result.done():
                    await self._session(request, name)
            # A node that another one has gone on for may never answer, or with what is not recorded.
            if session.offer is not offer:
                return None
            answer = calling.result()
            if answer.is_error and self._is_orphan(session):
                return None
            part = Part.of(answer.content, answer.headers)
            if not self._journals.add(offer["id"], offer["attempt"], part):
                return None
            return Response(part.body, answer.status_code, {"content-type": answer.headers["content-type"]})
        except httpx.TransportError:
            return None
        finally:
            calling.cancel()

    async def _count(self, request: Request) -> Response:
        self._sender(request)
        num_played = sum(each.claimed.done() for each in self._open.values())
        return JSONResponse({"waiting": len(self._open) - num_played, "played": num_played})

    async def _reward(self, request: Request) -> Response:
        """End a session by the result of its program, or keep the reward of one that has ended."""
        key, _ = self._sender(request)
        given = request.path_params["id"]
        result, name = _checked(await body_of(request)), self._named.get((key, given), given)
        session = self._open.get(name)
        if session is not None and session.claimed.done() and not session.result.done():
            if "later" in result:
                self._driver.late_rewards.expect(name)  # in this thread: no other result can come meanwhile
            session.result.set_result(result)
            return JSONResponse({"id": name, "object": "session", **result})
        try:
            if "later" in result:
                raise FileNotFoundError(name)
            await asyncio.to_thread(self._driver.late_rewards.give, name, result)
        except (FileNotFoundError, FileExistsError) as error:
            raise RequestError(
                f"No session {name!r} waits for a reward: it has its reward already, or its rollout has "
                "reached a limit, or there was never one. A session server that was started anew knows a "
                "session by the id in the answer to its claim and to later, and by no name.",
                status=404,
            ) from error
        return JSONResponse({"id": name, "object": "session", "late": True, **result})

    def _sender(self, request: Request) -> tuple[str, str]:
        """The name of a request's key, and of the session that it is of: empty where it names none."""
        headers = request.headers
        sender, name = self._driver.keys.sender(headers), headers.get(SESSION_HEADER, "")
        for key, colon, after in (each.rpartition(":") for each in sent_keys(headers) if sender is None):
            if colon:
                sender, name = self._driver.keys.name_of(key.encode("latin-1")), after
        if sender is None:
            raise unknown_key(f"Send a key of {KEYS_VARIABLE}")
        if name and NAME.fullmatch(name) is None:
            raise RequestError(
                f"{name[:80]!r} is no name of a session: use up to 64 of a-z, A-Z, 0-9, _ . @ -"
            )
        return sender, name


def _task_of(offer: Json) -> str:
    """The run and the task of an offer, as a text that is the same for equal ones."""
    return json.dumps([offer["run"], offer["task"]], sort_keys=True)


def _checked(result: Json) -> Json:
    """A program's result. Raises ``RequestError``."""
    rewards = result.get("rewards", [result.get("reward", 0.0)])
    given = [each for each in rewards if each is not None] if isinstance(rewards, list) else []
    if (
        len(result.keys() & {"reward", "rewards", "error", "later"}) != 1
        or result.get("later", True) is not True
        or not result.keys() <= RESULT_FIELDS
        or not given
        or not all(type(each) in (int, float) and is_reward(each) for each in given)
        or not isinstance(result.get("is_correct"), bool | None)
        or not isinstance(result.get("error", ""), str)
    ):
        raise RequestError(
            'Send {"reward": NUMBER}, if you like with "is_correct": true or false; {"rewards": [NUMBER, '
            '...]}, one for each call of the policy, or null to leave its answer out; {"later": true} where '
            'it is not known yet; or {"error": TEXT} where the task could not be played. A NUMBER is '
            f"finite, and at most {MAX_REWARD:g} above or below 0.",
        )
    return result


def run(listening: socket.socket, key_file: Path) -> None:
    """Serve programs until their training has ended, or no driver has come for ``DRIVER_SECONDS``.

    Args:
        key_file: has the key of drivers. It ends with the sessions.
    """
    sessions = Sessions(key_file.read_text())
    listener = serve(sessions.app, listening)
    while not sessions.ended.wait(CHECK_SECONDS):
        if sessions.alone_seconds() > DRIVER_SECONDS + 2 * CHECK_SECONDS:  # all calls have their error by now
            break
    key_file.unlink(missing_ok=True)
    listener.close()


def main() -> None:
    """Serve in a process of its own, at the socket and with the file of ``sys.argv``."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stderr.fileno())  # whoever reads the driver's output waits for its end, not for this
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each session has three connections
    run(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
