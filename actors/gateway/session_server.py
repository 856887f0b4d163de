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
have no answer yet are sent there: the program notices nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ray.util import get_node_ip_address
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.gateway.remote_program import RemoteProgram
from actors.gateway.server import (
    CALL_HEADER,
    COUNT_PATH,
    DIALECTS,
    MODELS_PATH,
    RETRY_HEADER,
    application,
    body_of,
    listen,
    num_retries,
    settled,
)
from actors.serving.keys import KEYS_VARIABLE, read_keys, sent_keys, unknown_key
from environments.data.late_rewards import LateRewards
from environments.errors import ConfigError
from environments.rewards.base import MAX_REWARD, is_reward
from policies.agent_api.context import SESSION_HEADER
from policies.model_api.errors import RequestError

SESSIONS_PORT = 8100
CLAIM_SECONDS = 120.0
"""Time that a task waits for a program."""
SILENT_SECONDS = 300.0
"""Time from one call of a program to the next, or to its reward."""
LOST_SECONDS = 120.0
"""Time that a session whose rollout actor is lost waits for another one."""
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


@dataclass(eq=False, slots=True)
class _Session:
    """A rollout that waits for a program, and then for its reward."""

    offer: Json
    """The last one: another actor goes on with a rollout whose process has died."""
    is_named: bool = False
    """True where its program calls the policy here."""
    claimed: asyncio.Future[None] = field(default_factory=asyncio.Future)
    result: asyncio.Future[Json] = field(default_factory=asyncio.Future)


class SessionServer:
    """Hands the tasks of rollouts to programs that ask for them. It lives in the process that trains.

    ``AgentTrainer(rollout=SessionServer().rollout, ...)`` trains what such programs do. They send a key of
    ``TROUPE_API_KEYS``, as clients of the policy server do; one who has it can play, and judge, any task.

    Attributes:
        url: its address, at this node.
        rollout: the rollout function.

    Args:
        port: 0 takes any that is free.
        host: address to listen at, which rollouts and programs reach; that of this node by default.
        claim_seconds: a task fails, and is tried again as often as failed rollouts are, where no program has
            asked for one for this time.
        late_rewards: folder of the rewards that come after their rollouts; it is made when one is awaited.
        silent_seconds: so does a task whose program has made no call for this time after an earlier one; one
            that makes none at all is waited for until the rollout reaches its time limit, and fails then.

    Raises:
        ConfigError: there is no key, or the port cannot be listened on.
    """

    def __init__(
        self,
        port: int = SESSIONS_PORT,
        host: str | None = None,
        claim_seconds: float = CLAIM_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        late_rewards: str | Path = "late_rewards",
    ) -> None:
        self._keys = read_keys(None)
        if not self._keys:
            raise ConfigError(
                f"Whoever reaches the session server could play and judge the tasks: set {KEYS_VARIABLE}="
                "name:key, with a key from `openssl rand -hex 24`, here and for the programs."
            )
        self._claim_seconds, self._late = claim_seconds, LateRewards(Path(late_rewards).resolve())
        self._open: dict[str, _Session] = {}
        """Sessions by their ids: those that wait for a program, and those that are played."""
        self._ended: dict[str, Json] = {}
        """Results by the ids of their sessions."""
        self._waiting: asyncio.Queue[_Session] = asyncio.Queue()
        """Sessions that wait for a program, and some that are over meanwhile."""
        self._named: dict[tuple[str, str], str] = {}
        """Ids of sessions by the name of the key and the name that their programs have chosen."""
        routes = [
            *(Route(path, self._pass_on, methods=["POST"]) for path in (*DIALECTS, COUNT_PATH)),
            Route(MODELS_PATH, self._pass_on, methods=["GET"]),
            Route("/offers", self._offer, methods=["POST"]),
            Route("/offers", self._withdraw, methods=["DELETE"]),
            Route("/sessions", self._claim, methods=["POST"]),
            Route("/sessions", self._count, methods=["GET"]),
            Route("/sessions/{id}/reward", self._reward, methods=["POST"]),
        ]
        host = host or get_node_ip_address()
        try:
            self._listener = listen(application(routes), host, port)
        except OSError as error:
            raise ConfigError(
                f"Programs elsewhere cannot fetch their tasks at port {port} of {host} ({error}): choose "
                f"another one, such as {port + 1}, or end the program that has it."
            ) from error
        self.url = self._listener.url
        self._last_request = time.monotonic()
        """The time at which a program has asked for a task the last time."""
        self.rollout = RemoteProgram(self.url, secrets.token_urlsafe(24), silent_seconds)

    def close(self) -> None:
        """Listen no more; programs that wait for a task get status 410."""
        self._listener.close()

    async def _offer(self, request: Request) -> Response:
        """Take the task of a rollout in, and answer when a program has played it."""
        self._check_rollout(request)
        offer = await request.json()
        if offer["id"] in self._ended:  # its actor has died with the result, or came too late
            return JSONResponse(self._ended[offer["id"]])
        if (session := self._open.get(offer["id"])) is None:
            session = self._open[offer["id"]] = _Session(offer)
            self._waiting.put_nowait(session)
        elif session.claimed.done() and not session.result.done() and not session.is_named:
            self._end(session, session.offer, LOST)
            return JSONResponse(LOST)
        session.offer = offer
        try:
            while not await settled(request, session.claimed, self._claim_seconds):
                if time.monotonic() - self._last_request >= self._claim_seconds:  # else they are busy
                    reason = (
                        f"No program has asked for a task for {self._claim_seconds:g} s: start some that "
                        f"send POST {self.url}/sessions with a key of {KEYS_VARIABLE}."
                    )
                    self._end(session, offer)
                    return JSONResponse({"failed": reason})
            await settled(request, session.result)
        except RequestError:
            seconds = LOST_SECONDS if session.claimed.done() else 0.0
            asyncio.get_running_loop().call_later(seconds, self._end, session, offer)
            raise
        self._end(session, offer)
        return JSONResponse(session.result.result())

    def _end(self, session: _Session, offer: Json, failure: Json = ENDED) -> None:
        """End a session, unless another actor has gone on with it. One that a program has had never opens
        again: whoever offers it gets the result, or the failure where it has none.
        """
        if session.offer != offer or self._open.pop(offer["id"], None) is None:
            return
        if session.claimed.done():
            self._ended[offer["id"]] = session.result.result() if session.result.done() else failure
            if len(self._ended) > MAX_NAMES:
                del self._ended[next(iter(self._ended))]

    async def _withdraw(self, request: Request) -> Response:
        """End a session whose rollout has ended without its result."""
        self._check_rollout(request)
        offer = await request.json()
        if (session := self._open.get(offer["id"])) is not None:
            self._end(session, offer)
        return Response(status_code=204)

    def _check_rollout(self, request: Request) -> None:
        if self.rollout.key not in sent_keys(request.headers):
            raise RequestError(
                "Only the rollouts of this training offer tasks.", status=401, code="invalid_api_key"
            )

    async def _claim(self, request: Request) -> Response:
        """Hand out the task that has waited longest; status 204 says that none waits now."""
        session = await self._session(request, self._sender(request))
        return Response(status_code=204) if session is None else JSONResponse(session.offer)

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
            self._named[name], session.is_named = session.offer["id"], True

    async def _pass_on(self, request: Request) -> Response:
        """Have the rollout of a named session answer a call of the policy."""
        name = self._sender(request)
        if not name[1]:
            raise RequestError(f"Name the session: send KEY:NAME for the key, or {SESSION_HEADER}: NAME.")
        session = await self._session(request, name)
        if session is None:
            raise RequestError("No task waits for a program now.", status=503, retry_after=1)
        call = secrets.token_urlsafe(12)
        async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as http:
            while (answer := await self._sent(request, session, name, call, http)) is None:
                await asyncio.sleep(RESEND_SECONDS)
                await self._session(request, name)
        return Response(answer.content, answer.status_code, {"content-type": answer.headers["content-type"]})

    async def _sent(
        self,
        request: Request,
        session: _Session,
        name: tuple[str, str],
        call: str,
        http: httpx.AsyncClient,
    ) -> httpx.Response | None:
        """The answer of the node that plays a session now; ``None`` where that is lost."""
        offer, way = session.offer, session.offer["environment"]
        sending = http.request(
            request.method,
            f"{way['ANTHROPIC_BASE_URL']}{request.url.path}",
            content=await request.body(),
            headers={
                "authorization": f"Bearer {way['OPENAI_API_KEY']}",
                RETRY_HEADER: str(num_retries(request)),
                CALL_HEADER: call,
            },
        )
        calling = asyncio.ensure_future(sending)
        try:
            while not await settled(request, calling, CHECK_SECONDS) and session.offer is offer:
                if not session.result.done():
                    await self._session(request, name)
            # A node that another one has gone on for may never answer, or with what is not recorded.
            return calling.result() if session.offer is offer else None
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
                self._late.expect(name)  # in this thread: no other result can come meanwhile
            session.result.set_result(result)
            return JSONResponse({"id": name, "object": "session", **result})
        try:
            if "later" in result:
                raise FileNotFoundError(name)
            await asyncio.to_thread(self._late.give, name, result)
        except (FileNotFoundError, FileExistsError) as error:
            raise RequestError(
                f"No session {name!r} waits for a reward: it has its reward already, or its rollout has "
                "reached a limit, or there was never one.",
                status=404,
            ) from error
        return JSONResponse({"id": name, "object": "session", "late": True, **result})

    def _sender(self, request: Request) -> tuple[str, str]:
        """The name of a request's key, and of the session that it is of: empty where it names none."""
        headers = request.headers
        sender, name = self._keys.sender(headers), headers.get(SESSION_HEADER, "")
        for key, colon, after in (each.rpartition(":") for each in sent_keys(headers) if sender is None):
            if colon:
                sender, name = self._keys.name_of(key.encode("latin-1")), after
        if sender is None:
            raise unknown_key(f"Send a key of {KEYS_VARIABLE}")
        if name and NAME.fullmatch(name) is None:
            raise RequestError(
                f"{name[:80]!r} is no name of a session: use up to 64 of a-z, A-Z, 0-9, _ . @ -"
            )
        return sender, name


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
