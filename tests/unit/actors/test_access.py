"""Who may use the endpoints: keys, names of the server, limits for each key. In front of any application."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from ray import serve
from starlette.datastructures import Headers

from actors.serving.access import OPEN_FOR_EACH_SAMPLED, Access, AccessControl, TokenBucket
from actors.serving.keys import ApiKeys, access_keys, read_keys
from actors.settings import AccessConfig, ServerConfig
from environments.errors import ConfigError
from policies.model_api.errors import RequestError
from policies.sampler import EngineStats

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEYS = ApiKeys(
    {name: hashlib.sha256(key.encode()).digest() for name, key in (("alice", ALICE), ("bob", BOB))}
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def application() -> FastAPI:
    app = FastAPI()
    app.add_middleware(AccessControl)

    @app.get("/health")
    @app.get("/ready")
    @app.get("/metrics")
    @app.get("/anything")
    async def anything() -> str:
        return "fine"

    @app.get("/tokens/{number}")
    async def tokens(number: int, request: Request) -> None:
        request.state.caller.charge_tokens(number)

    @app.get("/broken")
    async def broken() -> float:
        return 1 / 0

    @app.get("/long")
    async def long() -> None:
        await asyncio.sleep(60)

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "first"
            await asyncio.sleep(60)

        return StreamingResponse(parts())

    @app.get("/events")
    async def events() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            yield 'data: {"piece": 1}\n\n'
            await asyncio.sleep(60)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    @app.get("/short-events")
    async def short_events() -> StreamingResponse:
        return StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"]), media_type="text/event-stream")

    return app


@contextmanager
def behind(keys: ApiKeys = KEYS, **settings: object) -> Iterator[tuple[TestClient, Access]]:
    """A client of the application above, whose replica allows what ``settings`` say."""
    access = Access(keys, ServerConfig(access=AccessConfig(**settings)))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch, TestClient(application(), "http://localhost") as client:
        replica = SimpleNamespace(servable_object=SimpleNamespace(access=access))
        patch.setattr(serve, "get_replica_context", lambda: replica)
        yield client, access


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer(ALICE + "0"),
        {"authorization": f"Basic {ALICE}"},
        bearer("ä" * 20),
    ],
)
@pytest.mark.parametrize("path", ["/anything", "/docs", "/nowhere", "/health/../anything", "//health"])
def test_without_a_key_of_the_server_no_route_is_reached(headers: dict[str, str], path: str) -> None:
    with behind() as (client, _):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        response = client.get(path, headers=raw)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_key_opens_the_routes_and_health_needs_none() -> None:
    with behind() as (client, _):
        assert client.get("/anything", headers=bearer(ALICE)).json() == "fine"
        assert client.get("/health").status_code == 200


def test_without_keys_everybody_on_this_machine_may_ask() -> None:
    with behind(ApiKeys()) as (client, _):
        assert client.get("/anything").status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST", "trainer.example:80"]
)
def test_servers_own_names_are_served(host: str) -> None:
    with behind(hosts=["Trainer.example"]) as (client, _):
        assert client.get("/anything", headers={**bearer(ALICE), "host": host}).status_code == 200


@pytest.mark.parametrize("host", ["My-Machine:8000", "trainer.example.:8000", "[2001:db8::1]:8000"])
def test_name_that_the_error_says_is_served_when_it_is_added(host: str) -> None:
    headers = {**bearer(ALICE), "host": host}
    with behind() as (client, _):
        message = client.get("/anything", headers=headers).json()["error"]["message"]
    (name,) = re.findall(r"Host '(.*)' is not served here: add it to server.access.hosts", message)
    for given in (name, host):
        with behind(hosts=[given]) as (client, _):
            assert client.get("/anything", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.1", "", "[", "a@localhost.x"]
)
def test_another_name_of_the_server_is_rejected(host: str) -> None:
    with behind() as (client, _):
        assert client.get("/anything", headers={**bearer(ALICE), "host": host}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.1:8000", ""])
def test_probe_needs_no_name_of_the_server(host: str) -> None:
    with behind() as (client, _):
        for path in ("/health", "/ready"):
            assert client.get(path, headers={"host": host}).status_code == 200
        assert client.get("/metrics", headers={**bearer(ALICE), "host": host}).status_code == 200
        assert client.get("/metrics", headers={"host": host}).status_code == 401
    with behind(ApiKeys()) as (client, _):
        assert client.get("/metrics", headers={"host": "evil.example"}).status_code == 403


def test_route_that_can_be_read_can_be_asked_for_its_head() -> None:
    with behind() as (client, _):
        assert client.head("/anything", headers=bearer(ALICE)).status_code == 200
        assert client.head("/anything").status_code == 401


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("file://", 403),
        ("http://[::1", 403),
    ],
)
def test_web_pages_of_other_servers_are_rejected(origin: str, status: int) -> None:
    with behind() as (client, _):
        response = client.get("/anything", headers={**bearer(ALICE), "origin": origin})
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:3000", 204), ("https://pages.example", 204), ("https://evil.example", 403)],
)
def test_browser_may_ask_what_a_page_of_ours_may_send(origin: str, status: int) -> None:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with behind(hosts=["pages.example"]) as (client, _):
        answer = client.options("/anything", headers=asked)
        assert client.options("/anything", headers={"origin": origin}).status_code in (401, 403)
        health = client.get("/health", headers={"origin": origin})
    assert answer.status_code == status
    allowed = origin if status == 204 else None
    for each in (answer, health):
        assert each.headers.get("access-control-allow-origin") == allowed
    if allowed:
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"


def test_public_address_is_the_servers_name_with_its_path() -> None:
    with behind(hosts=["https://my.example/troupe/"]) as (client, _):
        headers = {**bearer(ALICE), "host": "my.example"}
        for path in ("/anything", "/troupe/anything"):
            assert client.get(path, headers=headers).json() == "fine"
        assert client.get("/troupes/anything", headers=headers).status_code == 404


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://my.example", "is no address"),
        ("https://[::1", "is no address"),
        ("https://my.example/?a=b", "is no address"),
        ("https://my.example/troupe/v1/", "leave out /v1"),
    ],
)
def test_public_address_that_clients_could_not_use_is_an_error(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        access_keys(ServerConfig(access=AccessConfig(hosts=[url])))


def test_keys_are_read_anew_when_their_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "keys"

    def write(text: str) -> None:
        other = tmp_path / "other"
        other.write_text(text)
        other.replace(file)

    def line(name: str, key: str) -> str:
        return f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n"

    write(line("alice", ALICE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROUPE_API_KEYS", "fixed:fixed-0123456789abcdef")
        keys = read_keys(str(file))
    with behind(keys, keys_file=str(file)) as (client, _):

        def statuses() -> list[int]:
            sent = (ALICE, BOB, "fixed-0123456789abcdef")
            return [client.get("/anything", headers=bearer(key)).status_code for key in sent]

        assert statuses() == [200, 401, 200]
        write(line("alice", ALICE) + line("bob", BOB))
        assert statuses() == [200, 200, 200]
        write(line("bob", BOB))
        assert statuses() == [401, 200, 200]
        write("no line of a key")
        assert statuses() == [401, 200, 200], "a broken file changes nothing"
        for broken in (2 * line("alice", ALICE), line("a/b", ALICE), line("fixed", ALICE)):
            write(broken)
            assert statuses() == [401, 200, 200], "nor does one that would keep a server from starting"
        write("")
        assert statuses() == [401, 401, 200]
        file.unlink()
        assert statuses() == [401, 401, 200], "nor does one that is gone"


def test_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {hashlib.sha256(ALICE.encode()).hexdigest()}")
    with behind(read_keys(str(file)), keys_file=str(file)) as (client, _):
        file.write_text("")
        assert client.get("/anything", headers=bearer(ALICE)).status_code == 401
        assert client.get("/anything").status_code == 401


def test_first_key_of_an_empty_file_closes_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").touch()
    monkeypatch.chdir(tmp_path)
    keys = read_keys("keys")
    monkeypatch.chdir("/")  # where a replica may work
    with behind(keys, keys_file="keys") as (client, _):
        assert client.get("/anything").status_code == 200
        (tmp_path / "keys").write_text(f"alice {hashlib.sha256(ALICE.encode()).hexdigest()}")
        assert client.get("/anything").status_code == 401
        assert client.get("/anything", headers=bearer(ALICE)).status_code == 200


def test_error_that_nobody_expected_is_counted_as_one() -> None:
    with behind() as (client, access):
        with pytest.raises(ZeroDivisionError):
            client.get("/broken", headers=bearer(ALICE))
        text = access.metrics.text(7, EngineStats(), num_waiting=0, tokens_in_flight=0)
    assert 'troupe_http_requests_total{key="alice",route="/broken",status="500"} 1.0' in text.splitlines()


def test_requests_are_counted_by_route_status_and_key() -> None:
    with behind() as (client, access):
        for path in ("/anything", "/tokens/3", "/tokens/4", "/nowhere", "/short-events"):
            client.get(path, headers=bearer(ALICE))
        client.get("/anything")
        text = access.metrics.text(7, EngineStats(num_tokens=5), num_waiting=2, tokens_in_flight=9)
    for line in (
        'troupe_http_requests_total{key="alice",route="/anything",status="200"} 1.0',
        'troupe_http_requests_total{key="alice",route="/tokens/{number}",status="200"} 2.0',
        'troupe_http_requests_total{key="alice",route="none",status="404"} 1.0',
        'troupe_http_requests_total{key="-",route="none",status="401"} 1.0',
        'troupe_http_request_seconds_count{route="/anything"} 1.0',
        'troupe_http_first_event_seconds_count{route="/short-events"} 1.0',
        "troupe_http_open_requests 0.0",
        "troupe_waiting_requests 2",
        "troupe_policy_version 7",
    ):
        assert line in text.splitlines(), text


def test_requests_are_logged_where_they_have_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    with behind() as (client, _):
        client.get("/anything", headers=bearer(ALICE))
    with behind(ApiKeys()) as (client, _):
        client.get("/anything")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    assert line.startswith("key alice: GET '/anything': 200")


def test_long_path_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    with behind() as (client, _):
        client.get(f"/{'a' * 50_000}")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    assert line.startswith("rejected: GET '/aaa") and len(line) < 500


def test_key_over_its_rate_learns_when_to_come_again() -> None:
    with behind(per_minute={"requests": 2}) as (client, _):
        statuses = [client.get("/anything", headers=bearer(ALICE)).status_code for _ in range(3)]
        rejected = client.get("/anything", headers=bearer(ALICE))
        assert client.get("/anything", headers=bearer(BOB)).status_code == 200
    assert statuses == [200, 200, 429]
    assert 25 <= int(rejected.headers["retry-after"]) <= 30
    assert "alice" in rejected.json()["error"]["message"]


def test_tokens_that_were_used_count_for_the_next_request() -> None:
    with behind(per_minute={"tokens": 60}) as (client, _):
        assert client.get("/tokens/100", headers=bearer(ALICE)).status_code == 200
        rejected = client.get("/tokens/1", headers=bearer(ALICE))
        assert client.get("/tokens/1", headers=bearer(BOB)).status_code == 200
    assert (rejected.status_code, rejected.json()["error"]["type"]) == (429, "tokens")
    assert 38 <= int(rejected.headers["retry-after"]) <= 41


def test_replicas_share_what_a_key_may_use() -> None:
    config = ServerConfig(num_replicas=2, access=AccessConfig(per_minute={"requests": 4}))
    access = Access(KEYS, config)
    headers = Headers({"host": "localhost", **bearer(ALICE)})
    for _ in range(2):
        with access.admitted("/", headers):
            pass
    with pytest.raises(RequestError) as caught, access.admitted("/", headers):
        pass
    assert caught.value.status == 429


def test_allowance_is_refilled_over_minute_and_saves_no_more() -> None:
    now = 0.0
    bucket = TokenBucket(6, lambda: now)
    bucket.spend(6)
    assert bucket.seconds_to_wait() == pytest.approx(10)
    now = 10.0
    assert bucket.seconds_to_wait() == 0
    now = 1000.0
    bucket.spend(6)
    assert bucket.seconds_to_wait() == pytest.approx(10)


def test_request_too_many_is_rejected_and_health_answers() -> None:
    with behind(max_sampled_answers=1) as (client, access), ExitStack() as requests:
        headers = Headers({"host": "localhost", **bearer(ALICE)})
        for _ in range(OPEN_FOR_EACH_SAMPLED):
            requests.enter_context(access.admitted("/anything", headers))
        rejected = client.get("/anything", headers=bearer(BOB))
        assert client.get("/health").status_code == 200
        requests.close()
        assert client.get("/anything", headers=bearer(BOB)).status_code == 200
    assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1")


@pytest.mark.slow
def test_request_that_takes_too_long_is_ended() -> None:
    with behind(max_request_seconds=1) as (client, _):
        response = client.get("/long", headers=bearer(ALICE))
        stream = client.get("/stream", headers=bearer(ALICE))
    assert response.status_code == 504
    assert "more than 1 s" in response.json()["error"]["message"]
    assert (stream.status_code, stream.text) == (200, "first"), "its form is not known, so it only ends"


@pytest.mark.slow
def test_stream_of_events_that_takes_too_long_ends_with_error() -> None:
    with behind(max_request_seconds=1) as (client, _):
        text = client.get("/events", headers=bearer(ALICE)).text
    first, last = (json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n"))
    assert first == {"piece": 1}
    assert last["error"]["code"] == "request_timeout" and "more than 1 s" in last["error"]["message"]


def test_request_that_finds_no_place_is_not_counted() -> None:
    with (
        behind(max_sampled_answers=1, per_minute={"requests": OPEN_FOR_EACH_SAMPLED}) as (client, access),
        ExitStack() as requests,
    ):
        headers = Headers({"host": "localhost"} | bearer(BOB))
        for _ in range(OPEN_FOR_EACH_SAMPLED):
            requests.enter_context(access.admitted("/anything", headers))
        statuses = [client.get("/anything", headers=bearer(ALICE)).status_code for _ in range(5)]
        requests.close()
        assert client.get("/anything", headers=bearer(ALICE)).status_code == 200
    assert statuses == [503] * 5


def test_log_says_why_a_request_was_rejected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    with behind(per_minute={"requests": 1}) as (client, _):
        for _ in range(2):
            client.get("/anything", headers=bearer(ALICE))
        client.get("/anything", headers={"host": "evil.example"})
    _, late, foreign = [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    assert late.startswith("rejected: GET '/anything': 429, The key 'alice' has used its requests")
    assert foreign.startswith("rejected: GET '/anything': 403, Host 'evil.example'")


def test_log_names_the_key_and_never_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    with behind() as (client, _):
        client.get("/anything%0afake", headers=bearer(ALICE))
        client.get("/anything", headers=bearer(BOB))
    first, second = [record.getMessage() for record in caplog.records if record.name == "ray.serve"]
    assert first.startswith("key alice: GET '/anything\\nfake': 404")
    assert second.startswith("key bob: GET '/anything': 200")
    assert ALICE not in caplog.text


# -- keys and the settings -------------------------------------------------------------------------------


def test_keys_come_from_environment_and_from_file_of_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", f"alice:{ALICE}, ")
    file = tmp_path / "keys"
    file.write_text(f"# our own\n\nbob {hashlib.sha256(BOB.encode()).hexdigest()}\n")
    keys = read_keys(str(file))
    assert keys == KEYS
    assert keys.name_of(BOB.encode()) == "bob" and keys.name_of(b"bob") is None
    assert ALICE not in repr(keys)


@pytest.mark.parametrize(
    ("variable", "file", "words"),
    [
        ("0123456789abcdef", None, "key 1 has no name: write TROUPE_API_KEYS=name:key"),
        (f"alice:{ALICE},bob:short", None, r"key 2 \(bob\) has 5 characters, and needs at least 16"),
        (f"alice:{ALICE},alice:{BOB}", None, "two keys with the name 'alice'"),
        (f"a b:{ALICE}", None, "'a b' cannot be the name"),
        ("", f"alice {ALICE}\n", "line 1 has to be the name of a key and the key's SHA-256.*sha256sum"),
        ("", None, r"keys_file=.*keys cannot be read"),
    ],
)
def test_key_that_cannot_be_used_is_error_that_does_not_show_it(
    variable: str, file: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", variable)
    path = tmp_path / "keys"
    if file is not None:
        path.write_text(file)
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(None if variable else str(path))
    assert not [secret for secret in (ALICE, BOB, "0123456789abcdef") if secret in str(caught.value)]


def test_only_loopback_is_served_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_API_KEYS", raising=False)
    local = ServerConfig(http_port=8000)
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        assert not access_keys(replace(local, http_host=host))
    for host in ("0.0.0.0", "", "10.0.0.1", "my-machine"):
        with pytest.raises(ConfigError, match=f"http_host={host} would let everybody in.*TROUPE_API_KEYS"):
            access_keys(replace(local, http_host=host))


def test_every_interface_needs_the_names_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", f"alice:{ALICE}")
    config = ServerConfig(http_port=8000, http_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"server\.access\.hosts=\[my-machine"):
        access_keys(config)
    assert access_keys(replace(config, access=AccessConfig(hosts=["my-machine"])))
    for nothing in ("", ":8000", "my-machine/", "["):
        with pytest.raises(ConfigError, match="is no name of a machine: write it like"):
            access_keys(replace(config, access=AccessConfig(hosts=[nothing])))
    assert access_keys(replace(config, http_host="10.0.0.1"))


def test_limits_of_keys_need_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUPE_API_KEYS", raising=False)
    for unit in ("requests", "tokens"):
        access = AccessConfig(per_minute={unit: 5})
        with pytest.raises(ConfigError, match="counts for each key, and there is none"):
            access_keys(ServerConfig(http_port=8000, access=access))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"request": 5}, r"per_minute='request' is not one of requests, tokens"),
        ({"tokens": 0}, r"per_minute\.tokens=0 has to be at least 1"),
    ],
)
def test_limits_of_keys_have_names_and_bounds(
    limits: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", "alice:0123456789abcdef0123")
    with pytest.raises(ConfigError, match=message):
        access_keys(ServerConfig(http_port=8000, access=AccessConfig(per_minute=limits)))


def test_server_without_an_address_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", "nonsense")
    assert not access_keys(ServerConfig())
