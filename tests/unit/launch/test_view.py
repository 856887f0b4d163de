"""The page of a run: what it answers, to whom, and how fast where there is much to read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from machine import cpu_seconds
from test_trajectory_log import conversation, group

from environments.command_name import command_name
from environments.errors import ConfigError
from launch import view
from launch.reporting.tracker import ALARMS, METRICS, SETTINGS
from launch.run_folder.jsonl_log import JsonlLog
from launch.run_folder.trajectory_log import FOLDER, TrajectoryLog
from launch.viewing import pages as viewing
from launch.viewing.pages import FILES, application

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two updates and one evaluation."""
    folder = tmp_path / "run"
    folder.mkdir()
    records = [{"step": step, "rollout/reward_mean": step / 2, "learn/loss": float("nan")} for step in (1, 2)]
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    log = TrajectoryLog(folder, 9)
    nasty = conversation("00000000/0001", 2)
    nasty.task = {"question": NASTY}
    groups = [group(0, conversation("00000000/0000", 3), nasty)]
    unused = {"zero_signal": [group(1, conversation("00000001/0000", 1))]}
    for step in (1, 2):
        log.record_update(step, groups, unused, {"00000000/0000": [0.5, -0.5, 0.25]})
    log.record_evaluation(0, groups)
    return folder


def client(*runs: Path) -> TestClient:
    return TestClient(application(runs), base_url="http://127.0.0.1")


def test_resumed_run_is_sent_anew_without_repeated_updates(run: Path) -> None:
    browser = client(run)
    seen = browser.get("/api/runs/0").json()
    log = JsonlLog(run / METRICS, last_step=1)
    log.append({"step": 2, "rollout/reward_mean": 0.25})
    news = browser.get(f"/api/runs/0?after={len(seen['records'])}&file={seen['file']}").json()
    assert [each["rollout/reward_mean"] for each in news["records"]] == [0.5, 0.25]
    assert news["file"] != seen["file"]


def test_page_shows_metrics_groups_and_turns(run: Path) -> None:
    browser = client(run)
    assert browser.get("/api/runs").json() == [str(run)]
    overview = browser.get("/api/runs/0").text
    assert json.loads(overview)["steps"] == {"step": [1, 2], "eval": [0]}
    file = json.loads(overview)["file"]
    assert [each["step"] for each in browser.get(f"/api/runs/0?after=1&file={file}").json()["records"]] == [2]

    groups = browser.get("/api/runs/0/step/2").json()
    assert [[each["fate"] for each in group["members"]] for group in groups] == [
        ["trained", "trained"],
        ["zero_signal"],
    ]
    assert browser.get("/api/runs/0/eval/0").json()[0]["members"][1]["row"] == 1

    shown = browser.get("/api/runs/0/step/2/0").json()
    assert [turn["advantage"] for turn in shown["turns"]] == [0.5, -0.5, 0.25]
    assert [[each["role"] for each in turn["messages"]] for turn in shown["turns"]] == [
        ["user", "assistant"],
        ["user", "assistant"],
        ["user", "assistant"],
    ], "only what was new in the turn"
    assert len(shown["turns"][0]["tokens"]) == len(shown["turns"][0]["logprobs"]) == 20


def test_success_of_a_member_is_what_its_judge_says(run: Path) -> None:
    wrong, right = conversation("00000000/0000", 1), conversation("00000000/0001", 1)
    wrong.reward, wrong.is_correct, wrong.by_reward_function = 0.1, False, True
    right.reward, right.is_correct = 0.0, True
    TrajectoryLog(run, 9).record_update(3, [group(0, wrong, right)], {}, {})
    browser = client(run)
    (shown,) = browser.get("/api/runs/0/step/3").json()
    assert [(each["reward"], each["success"], each["judged_by"]) for each in shown["members"]] == [
        (0.1, False, "reward function"),
        (0.0, True, "environment"),
    ]
    whole = browser.get("/api/runs/0/step/3/0").json()
    assert (whole["success"], whole["judged_by"]) == (False, "reward function")


def test_task_is_found_in_all_updates_and_evaluations(run: Path) -> None:
    found = client(run).get("/api/runs/0/step/2/1/same").json()
    assert [(each["kind"], each["step"], each["row"], each["fate"]) for each in found] == [
        ("eval", 0, 1, "evaluated"),
        ("step", 1, 1, "trained"),
        ("step", 2, 1, "trained"),
    ]


def test_newest_alarms_and_the_settings_are_there(run: Path) -> None:
    browser = client(run)
    assert browser.get("/api/runs/0").json()["alarms"] == []
    assert browser.get("/api/runs/0/settings").text == ""
    (run / ALARMS).write_text("".join(f'{{"step": {step}, "text": "Look."}}\n' for step in range(60)))
    (run / SETTINGS).write_text("seed: 1\n")
    assert [each["step"] for each in browser.get("/api/runs/0").json()["alarms"]] == list(range(10, 60))
    assert browser.get("/api/runs/0/settings").text == "seed: 1\n"


def test_damaged_settings_file_is_told_in_a_sentence(run: Path) -> None:
    for damage in (b"run: [", bytes(range(128, 256))):
        (run / "settings.yaml").write_bytes(damage)
        answer = client(run).get("/api/runs/0/settings")
        assert answer.status_code == 200
        assert answer.text.startswith(f"{run / 'settings.yaml'} is damaged (") and "\n" not in answer.text


def test_number_that_json_does_not_know_reaches_the_browser(run: Path) -> None:
    text = client(run).get("/api/runs/0").text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"a browser cannot read {name}"))


def test_models_text_is_data_to_the_browser(run: Path) -> None:
    answer = client(run).get("/api/runs/0/step/2/1")
    assert answer.json()["task"] == {"question": NASTY}
    assert answer.headers["content-type"] == "application/json"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for script in FILES.glob("*.js"):
        text = script.read_text(encoding="utf-8")
        assert not any(word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval("))


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/1",
        "/api/runs/-1",
        "/api/runs/0/step/7",
        "/api/runs/0/step/2/99",
        "/api/runs/0/..%2f..%2fetc/1",
        "/page.py",
        "/pages.py",
        "/..%2fview.py",
    ],
)
def test_what_is_not_there_is_not_found(path: str, run: Path) -> None:
    assert client(run).get(path).status_code in (404, 422)


def test_foreign_host_is_turned_away(run: Path) -> None:
    assert client(run).get("/", headers={"host": "evil.example"}).status_code == 400
    assert client(run).get("/", headers={"host": "localhost:8010"}).status_code == 200


def test_all_that_the_page_loads_is_its_own(run: Path) -> None:
    browser = client(run)
    html = browser.get("/").text
    assert "//" not in html.replace("<!doctype html>", "")
    for name in ("elements.js", "charts.js", "page.js", "page.css"):
        assert name in html and browser.get(f"/{name}").status_code == 200


def test_page_of_another_server_may_not_talk_to_the_model(run: Path) -> None:
    said = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    answer = client(run).post("/api/talk", json=said, headers={"origin": "http://evil.example"})
    assert (answer.status_code, answer.json()["detail"]) == (403, "http://evil.example may not ask here.")


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200)])
def test_page_of_another_site_may_not_even_load_image_from_here(site: str, status: int, run: Path) -> None:
    """Such a request has no origin, and would start what it asks for although the page sees no answer."""
    answer = client(run).get("/api/runs", headers={"sec-fetch-site": site})
    assert answer.status_code == status
    assert status == 200 or site in answer.json()["detail"]
    assert client(run).get("/", headers={"sec-fetch-site": "none"}).status_code == 200


def test_without_a_policy_server_the_talk_says_how_to_get_one(run: Path) -> None:
    browser = TestClient(application([run], server="http://127.0.0.1:9/v1"), base_url="http://127.0.0.1")
    said = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    for answer in (browser.get("/api/models"), browser.post("/api/talk", json=said)):
        assert answer.status_code == 502
        assert "No policy server answers at http://127.0.0.1:9/v1" in answer.json()["detail"]
        assert f"Start one by `{command_name('serve')} " in answer.json()["detail"]


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://x/v1", "http:///v1", "http://[x/v1"])
def test_address_that_is_none_of_a_server_is_an_error(
    address: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view.main([str(run), "--server", address]) == 2
    assert f"--server {address} is no address of a server" in capsys.readouterr().err


def test_what_keeps_the_state_of_a_run_away_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.exit('ConfigError: This machine has no cluster.')"
    monkeypatch.setattr(viewing, "STATUS_COMMAND", (sys.executable, "-c", script))
    answer = client(run).get("/api/runs/0/actors").text
    assert json.loads(answer.removeprefix("data: "))["end"] == "ConfigError: This machine has no cluster."


def test_state_is_that_of_the_run_that_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch.status`` is played by a program that prints two looks: the run goes on, then another one."""
    other, shown = {"folder": "/b"}, {"folder": str(run), "num_updates": 3}
    looks = [{"runs": [other, shown]}, {"runs": [other]}]
    script = f"print({json.dumps(json.dumps(looks[0]))}); print({json.dumps(json.dumps(looks[1]))})"
    monkeypatch.setattr(viewing, "STATUS_COMMAND", (sys.executable, "-c", script))
    first, second = [
        json.loads(line[6:]) for line in client(run).get("/api/runs/0/actors").text.split("\n") if line
    ]
    assert first == {"state": {"folder": str(run), "num_updates": 3}}
    assert second["end"] == f"{run} is not going on in this cluster. Others are: /b."


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_script_can_be_read() -> None:
    for script in FILES.glob("*.js"):
        subprocess.run(["node", "--check", str(script)], check=True)


def test_file_that_an_update_has_replaced_is_read_anew(run: Path) -> None:
    browser = client(run)
    before = browser.get("/api/runs/0/step/2").json()
    time.sleep(0.01)
    TrajectoryLog(run, 9).record_update(2, [group(5, conversation("00000005/0000", 1))], {}, {})
    after = browser.get("/api/runs/0/step/2").json()
    assert (len(before), [each["id"] for each in after]) == (2, ["00000005"])


@pytest.mark.slow
def test_long_run_opens_at_once(tmp_path: Path) -> None:
    """1,000 updates with 40 metrics; 64 trajectories of 5 turns in an update."""
    record = {f"learn/metric_{number}": 0.123456789 * number for number in range(40)}
    lines = (json.dumps({"step": step, **record}) + "\n" for step in range(1, 1001))
    (tmp_path / METRICS).write_text("".join(lines))
    members = [conversation(f"00000000/{index:04d}", 5) for index in range(64)]
    TrajectoryLog(tmp_path, 2000).record_update(1, [group(0, *members)], {}, {})
    source = tmp_path / FOLDER / "step_000001.jsonl"
    for step in range(2, 1001):
        (tmp_path / FOLDER / f"step_{step:06d}.jsonl").hardlink_to(source)
    for path, most in (("/api/runs/0", 2.0), ("/api/runs/0/step/500", 0.6), ("/api/runs/0/step/500/9", 0.6)):
        browsers = [client(tmp_path) for _ in range(3)]  # a second answer costs less
        assert cpu_seconds(lambda: browsers.pop().get(path).raise_for_status()) < most, path  # noqa: B023


def test_change_of_the_run_is_told_to_the_browser(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(viewing, "REFRESH_SECONDS", 0.0)

    async def follow() -> list[str]:
        told = viewing._changes(run)
        events = [await anext(told), await anext(told)]
        with (run / METRICS).open("a") as file:
            file.write('{"step": 3}\n')
        return [*events, await anext(told)]

    first, second, third = asyncio.run(follow())
    assert first == third == "data: changed\n\n" and second.startswith(":")


def test_command_shows_newest_run_or_those_that_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(ConfigError, match="make train"):
        view.run_folders([])
    shutil.copytree(run, run.parent / "runs" / "a")
    assert view.run_folders([]) == [Path("runs/a")]
    assert view.run_folders(["run"]) == [Path("run")]
    with pytest.raises(ConfigError, match="no run's folder"):
        view.run_folders(["runs"])


def test_bad_arguments_are_answered_with_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view.main([str(run), "--port", "99999999"]) == 2
    assert view.main(["nowhere"]) == 2
    assert "Traceback" not in capsys.readouterr().err
