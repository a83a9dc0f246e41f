"""A/B files, and a complete comparison of two mock servers."""

import json
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import loadtest
from loadtest.errors import LoadTestError

pytest.importorskip("matplotlib")

from loadtest.ab import ab, measure
from loadtest.ab.ab import _at_once, _staircases, _warmup, run_comparison
from loadtest.ab.comparison_file import Server, load_comparison
from loadtest.ab.measure import Staircase, Turn, name_of_start
from loadtest.ab.progress import prediction
from loadtest.ab.rounds import rounds
from loadtest.ab.server import Running
from loadtest.mock_server import Timing
from loadtest.runs.server_metrics import Metrics
from loadtest.runs.target import Target
from loadtest.traffic.schedule import fingerprint, read_schedule
from tests.loadtest.runs import write_run
from tests.loadtest.servers import mock, scripted
from tests.support.local_servers import free_port

SHIPPED = sorted((Path(loadtest.__file__).parent / "comparisons").glob("*.yaml"))
TEXT = """
title: Two mocks
traffic:
  - {{scenario: smoke, rates: [5, 8], duration: 2, settle: 0.5, tail: 0.5}}
  - {{scenario: calibration, rates: [6], duration: 2, settle: 0, tail: 0, search: {{steps: 1}}}}
baseline: slow
processes: 2
repeats: 2
warmup: 1
port: {port}
servers:
  - {{label: slow, model: mock, command: "{python} -m loadtest mock --port {{port}} --itl 0.04"}}
  - {{label: fast, model: mock, command: "{python} -m loadtest mock --port {{port}} --itl 0.02"}}
"""


REMOTE = "  - {{{{label: there, model: mock, {}}}}}\n"


def written(directory: Path, text: str = TEXT, *, port: int = 8100) -> Path:
    """The file of a comparison."""
    path = directory / "ab.yaml"
    path.write_text(text.format(port=port, python=sys.executable))
    return path


def write_trace(directory: Path, **more: object) -> None:
    """Requests for 6 s, at two a second, in mine.jsonl."""
    request = {"input_length": 20, "output_length": 8, **more}
    lines = [json.dumps({"timestamp": 500 * k, **request}) for k in range(13)]
    (directory / "mine.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_comparisons_are_right(path: Path) -> None:
    comparison = load_comparison(path)
    assert all("{port}" in (server.command or "") for server in comparison.servers)


SMOKE, FAST = "scenario: smoke", "label: fast"
# What is changed in TEXT, into what, and what the error names.
WRONG = [
    (TEXT, "title: x", "traffic"),
    ("baseline: slow", "baseline: none", "baseline"),
    (FAST, "label: slow", "labels"),
    (FAST, "label: ../fast", "servers.1.label"),
    ("[5, 8]", "[8, 5]", "rates of smoke"),
    (SMOKE, "scenario: nope", "'nope'"),
    ("--port {{port}} --itl 0.02", "--itl 0.02", "fast: command has no {port}"),
    (FAST, "label: fast, url: 'http://h'", "fast: give either"),
    ("--itl 0.02", "'", "fast: cannot be read"),
    ("duration: 2", "duration: 1e12", "604800"),
    (SMOKE, "trace: a, scenario: smoke", "a scenario or a trace"),
    (SMOKE, "slo: {{ttft: 1}}, scenario: smoke", "slo of smoke"),
    (SMOKE, "trace: /no", "/no: "),
    (SMOKE, "prompts: /no, scenario: smoke", "/no: "),
    ("rates: [6], ", "", "rates of calibration"),
    ("scenario: calibration", SMOKE, "same name"),
    ("repeats: 2", "start: again", "start 'again'"),
]
# What is wrong with a server that runs elsewhere.
WRONG_REMOTE = [
    ("url: 'h'", "there: 'h'"),
    ("url: 'http://h', ca: x", "there: http://h: "),
    ("url: 'https://h', ca: /no", "there: /no: "),
    ("url: 'http://h', key_file: /no", "there: /no: "),
    ('url: "http://h", headers: {{a: "b\\nsecret"}}', "there: header a: "),
    ("url: 'http://h', environment: {{A: b}}", "there: environment"),
]


@pytest.mark.parametrize(
    ("text", "named"),
    [(TEXT.replace(old, new), named) for old, new, named in WRONG]
    + [(TEXT + REMOTE.format(there), named) for there, named in WRONG_REMOTE],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, named: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(LoadTestError) as caught:
        load_comparison(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_prediction_counts_every_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    lines = prediction(load_comparison(written(tmp_path))).splitlines()
    # 2 servers x 2 repeats x 2 rates x 3 s; of the other 2 x 2 x (1 rate and 1 of a search) x 2 s.
    assert lines[0] == "smoke at 5, 8/s: 2 servers x 2 repeats, 24 s of traffic"
    assert lines[1].endswith("up to 1 of a search: 2 servers x 2 repeats, 16 s of traffic")
    # And 12 clients of 8 s.
    assert lines[2].startswith("about 2 min, and 4 starts of a server with 1 s")
    elsewhere = load_comparison(written(tmp_path, TEXT + REMOTE.format("url: 'http://h'")))
    (*_, last) = prediction(elsewhere).splitlines()
    assert "4 starts of a server, none of the 1 that run elsewhere" in last
    once = load_comparison(written(tmp_path), repeats=1, side_by_side=True)
    said = prediction(once)
    assert "x 1 repeat," in said
    assert "in 1 round side by side" in said


def test_servers_side_by_side_change_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("loadtest.ab.rounds.installed", list)
    text = TEXT.replace("label: slow,", "label: slow, gpus: 2,")
    text = f"side_by_side: true\n{text}" + REMOTE.format("url: 'http://h'")
    comparison = load_comparison(written(tmp_path, text))
    assert "about 1 min" in prediction(comparison)

    def gpus(shift: int) -> list[dict[str, str | None]]:
        return [{s.label: own for s, own in at_once} for at_once in rounds(comparison, shift)]

    assert gpus(0) == [{"slow": "0,1", "fast": "2", "there": None}]
    assert gpus(1) == [{"fast": "0", "there": None, "slow": "1,2"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert gpus(0) == [{"slow": "3,5", "fast": "7", "there": None}]
    # Who finds none free waits.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpus(0) == [{"slow": "3,5"}, {"fast": "3", "there": None}]
    assert gpus(1) == [{"fast": "3", "there": None}, {"slow": "3,5"}]
    assert "2 min" in prediction(comparison)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(LoadTestError, match=r"CUDA_VISIBLE_DEVICES=3 .*slow"):
        gpus(0)
    # Where nothing is named, those count that the machine has.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("loadtest.ab.rounds.installed", lambda: ["an H200", "an H200"])
    assert gpus(0) == [{"slow": "0,1"}, {"fast": "0", "there": None}]
    monkeypatch.setattr("loadtest.ab.rounds.installed", lambda: ["an H200"])
    with pytest.raises(LoadTestError, match="slow"):
        gpus(0)
    own = text.replace("label: fast,", "label: fast, environment: {{CUDA_VISIBLE_DEVICES: '1'}},")
    comparison = load_comparison(written(tmp_path, own))
    with pytest.raises(LoadTestError, match=r"fast: .*CUDA_VISIBLE_DEVICES"):
        gpus(0)


def test_a_turn_has_its_gpus_and_a_port_of_its_own(tmp_path: Path) -> None:
    comparison = load_comparison(written(tmp_path))
    turn = Turn(comparison, comparison.servers[1], "1", tmp_path, 2, "5,7")
    assert (turn.port, turn.environment) == (8102, {"CUDA_VISIBLE_DEVICES": "5,7"})


def test_an_error_beside_others_waits_for_them() -> None:
    done: list[str] = []
    fails = Mock(side_effect=LoadTestError("mine"))
    with pytest.raises(LoadTestError, match="mine"):
        _at_once([fails, lambda: done.append("other")])
    assert done == ["other"]


def test_ctrl_c_reports_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = written(tmp_path), tmp_path / "out"

    def stopped(*_: object) -> None:
        write_run(out / "runs" / "slow-1", "slow")
        write_run(out / "runs" / "fast-1", "fast")
        (out / "runs" / "slow-2").mkdir()  # which was under way
        raise KeyboardInterrupt

    monkeypatch.setattr(ab, "_measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_comparison(load_comparison(path), out)
    content = json.loads((out / "report.json").read_text())
    assert {run["directory"] for run in content["runs"]} == {"slow-1", "fast-1"}
    assert [(c["label"], c["baseline"]) for c in content["comparisons"]] == [("fast", "slow")]


def test_a_start_is_told_by_its_beginning_or_by_the_servers_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = b"process_start_time_seconds 1.7e+09\n"
    comparison = load_comparison(written(tmp_path))
    started = comparison.servers[0]

    def name(server: Server, since: float) -> str:
        turn = Turn(comparison, server, "1", tmp_path)
        return name_of_start(turn, Running(None, "", None, 0.0, since))

    with scripted(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + metrics) as url:
        there = Server(label="there", model="m", url=url)
        assert name(there, 1.0) == f"{url} since 1700000000"
    # Nobody answers there now.
    assert name(there, 1.0) == url
    # Metrics behind a balancer are of any replica, so what is given counts.
    elsewhere = written(tmp_path, TEXT + REMOTE.format("url: 'http://h'"))
    comparison = load_comparison(elsewhere, start="2")
    monkeypatch.setattr(measure, "scrape", lambda _: {"process_start_time_seconds": 1.7e9})
    assert name(there, 1.0) == f"{url} 2"
    # Also one that is measured again later is one start.
    assert name(started, 1.0) == name(started, 1.0) != name(started, 2.0)


def test_a_step_that_the_client_ended_before_its_scrape_has_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"start_at": 0}')
    scraped: list[Metrics] = []
    ended = threading.Event()
    ended.set()
    measure._scrape_at(Target("http://127.0.0.1:9", "m"), tmp_path, [0.0, 5.0], scraped, ended)
    assert scraped == [{}, {}]


def test_a_trace_is_replayed_by_all_servers_at_its_rate_and_at_others(tmp_path: Path) -> None:
    write_trace(tmp_path, hash_ids=[7])
    trace = f"{{{{trace: {tmp_path}/mine.jsonl, "
    text = TEXT.replace("{{scenario: smoke, rates: [5, 8], ", trace)
    (mine, _) = load_comparison(written(tmp_path, text)).traffic
    assert (mine.name, mine.rates, mine.step) == ("mine", [2.0], 3.0)
    # In milliseconds, for 3 s at 2/s, and twice as fast.
    one, two = mine.schedule(2.0, 3.0, 1), mine.schedule(4.0, 3.0, 1)
    assert [r.timestamp for r in one.requests] == [0, 500, 1000, 1500, 2000, 2500]
    assert [r.timestamp for r in two.requests] == [250 * k for k in range(12)]
    assert one.traffic["scenario"]["name"] == "mine"
    assert one.traffic["shared_prefix_fraction"] == pytest.approx(5 / 6)
    # Each repeat has the same requests, so all of its runs have partners.
    comparison = load_comparison(written(tmp_path, text))
    steps = [_staircases(comparison, repeat, tmp_path)[0].steps[0] for repeat in "12"]
    assert len({fingerprint(step.schedule) for step in steps}) == 1
    with pytest.raises(LoadTestError, match=r"mine\.jsonl"):
        mine.schedule(4.0, 3.5, 1)


def test_a_step_whose_window_came_out_empty_is_drawn_again(tmp_path: Path) -> None:
    rates = "{{scenario: azure-code, rates: [0.2, 1], duration: 30, settle: 8, tail: 2}}"
    old = "{{scenario: smoke, rates: [5, 8], duration: 2, settle: 0.5, tail: 0.5}}"
    comparison = load_comparison(written(tmp_path, TEXT.replace(old, rates)))

    # With their first seeds 2 and 8 have a step without a request, and 5 and 8 a window.
    for repeat in "258":
        steps = _staircases(comparison, repeat, tmp_path)[0].steps
        schedules = [read_schedule(step.schedule) for step in steps]
        for schedule in schedules:
            assert any(8 <= request.timestamp / 1000 < 38 for request in schedule.requests)
        # Whoever goes on after a stop gets the same.
        _staircases(comparison, repeat, tmp_path)
        assert schedules == [read_schedule(step.schedule) for step in steps]
    (traffic, _) = comparison.traffic
    with pytest.raises(LoadTestError, match="azure-code: no request in 1"):
        traffic.schedule(1e-6, 1.0, 0)
    with pytest.raises(LoadTestError, match="azure-code: no request between 50 and 60 s"):
        traffic.schedule(1.0, 40.0, 0, (50.0, 60.0))
    # Another seed gives a trace no other requests.
    write_trace(tmp_path)
    trace = traffic.model_copy(update={"scenario": None, "trace": tmp_path / "mine.jsonl"})
    with pytest.raises(LoadTestError, match=r"mine: no request between 2\.1 and 2\.4 s"):
        trace.schedule(2.0, 4.0, 0, (2.1, 2.4))


def test_prompts_of_a_file_are_sent_each_once_before_any_twice(tmp_path: Path) -> None:
    prompts = [f"Tell me\u2028of {k}." for k in range(4)]
    file = tmp_path / "mine.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in prompts]
    file.write_text("".join(lines), encoding="utf-8")
    text = TEXT.replace("scenario: smoke,", f"scenario: smoke, prompts: {file},")
    comparison = load_comparison(written(tmp_path, text))
    traffic, without = comparison.traffic[0], load_comparison(written(tmp_path)).traffic[0]
    assert traffic.name == "smoke-mine"
    one, other = traffic.schedule(8.0, 3.0, 1), without.schedule(8.0, 3.0, 1)
    assert [r.timestamp for r in one.requests] == [r.timestamp for r in other.requests]
    sent = [request.body["prompt"] for request in one.requests]
    assert sorted(map(str, sent[:4])) == sorted(map(str, sent[4:8])) == prompts
    assert sent != [r.body["prompt"] for r in traffic.schedule(8.0, 3.0, 2).requests]
    # Lengths are estimates of these prompts, not the scenario's.
    assert {request.input_length for request in one.requests} == {4}
    assert one.traffic["input_length"]["p99"] == 4
    # What a server has seen in its warm-up would help it later.
    warmup = read_schedule(_warmup(comparison, tmp_path))
    assert not any(r.body for r in warmup.requests)
    assert {r.input_length for r in warmup.requests} == {4}
    chat = text.replace("label: fast,", "label: fast, endpoint: chat,")
    with pytest.raises(LoadTestError, match="/v1/chat"):
        load_comparison(written(tmp_path, chat))
    for wrong, why in (
        ("[1]", "mine.jsonl:1: "),
        ('{"prompt": "a", "n": 2}', "mine.jsonl:1: body"),
    ):
        file.write_text(wrong)
        with pytest.raises(LoadTestError, match=why):
            load_comparison(written(tmp_path, text))


def test_steps_whose_client_did_not_keep_up_are_repeated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = load_comparison(written(tmp_path))
    first, _ = _staircases(comparison, "1", tmp_path)
    climbed: list[Staircase] = []

    def climb(*given: Any) -> list[Path]:
        staircase = given[2]
        climbed.append(staircase)
        return [
            write_run(tmp_path / "runs" / name, lag=0.1 if name.endswith("8-per-second") else 0.001)
            for name in (step.name for step in staircase.steps)
        ]

    monkeypatch.setattr(ab, "climb", climb)
    runs = ab._climb(Turn(comparison, comparison.servers[0], "1", tmp_path), None, first)  # type: ignore[arg-type]
    assert [run.name for run in runs] == [
        "smoke-5-per-second",
        "smoke-8-per-second",
        "smoke-8-per-second-again",
    ]
    whole, again = climbed
    # The same arrivals from the beginning of the staircase, and other prompts.
    assert [step.schedule for step in again.steps] == [whole.steps[1].schedule]
    assert again.steps[0].begin == 0
    one, two = read_schedule(whole.schedule), read_schedule(again.schedule)
    assert one.prompts.seed != two.prompts.seed


def test_a_search_with_a_trace_stops_where_the_trace_is_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path)
    text = TEXT.replace("scenario: calibration, rates: [6]", f"trace: {tmp_path}/mine.jsonl")
    comparison = load_comparison(written(tmp_path, text.replace("steps: 1", "steps: 9")))
    (_, traffic) = comparison.traffic
    tested: list[float] = []

    def climb(*given: Any) -> list[Path]:
        (step,) = given[2].steps
        schedule, run = read_schedule(step.schedule), tmp_path / "runs" / step.name
        tested.append(schedule.traffic["scenario"]["rate"])
        return [write_run(run, schedule=schedule)]  # all of its requests are good

    monkeypatch.setattr(ab, "climb", climb)
    turn = Turn(comparison, comparison.servers[0], "1", tmp_path)
    first = write_run(tmp_path / "first", schedule=traffic.schedule(5.0, traffic.step, 1))
    assert len(ab._search(turn, None, traffic, [first])) == 1  # type: ignore[arg-type]
    assert tested == [6.0]  # 12 requests after the first one, in 2 s


@pytest.mark.slow
@pytest.mark.needs("locust")
@pytest.mark.parametrize(
    ("server", "message"),
    [
        # A server of files: of one, /health, and of no POST.
        ("{python} -m http.server -d HERE {{port}}", "every request failed, such as by HTTP 501"),
        ("timeout 8 {python} -m loadtest mock --port {{port}}", "the server exited with 124"),
    ],
)
def test_a_server_that_answers_nothing_or_dies_ends_the_comparison(
    tmp_path: Path, server: str, message: str
) -> None:
    (tmp_path / "health").touch()
    server = server.replace("HERE", str(tmp_path))
    text = TEXT.replace("{python} -m loadtest mock --port {{port}} --itl 0.04", server)
    path = written(tmp_path, text.replace("duration: 2", "duration: 600"), port=free_port())
    with pytest.raises(LoadTestError, match=message) as raised:
        run_comparison(load_comparison(path), tmp_path / "out")
    assert str(tmp_path / "out" / "slow-1.log") in str(raised.value)


@pytest.mark.slow
@pytest.mark.needs("locust")
def test_a_comparison_runs_every_server_in_alternating_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    text = TEXT.replace("  - {{scenario: calibration", "#")  # each step is a client's start
    path = written(tmp_path, text, port=port)
    report = run_comparison(load_comparison(path), tmp_path / "out")
    said = capsys.readouterr().out.splitlines()
    turns = [line.split(":")[0] for line in said if ": turn " in line and "min left" in line]
    assert turns == ["slow-1", "fast-1", "fast-2", "slow-2"]
    starts = [line.split()[1] for line in said if line.startswith("starting")]
    assert starts == [f"{turn}:" for turn in turns]
    content = json.loads(report.with_suffix(".json").read_text())
    there = [path.name for path in (tmp_path / "out" / "runs").iterdir()]
    assert len([name for name in there if "again" not in name]) == 4 * 2
    # A step whose client did not keep up is there a second time, and may be left out.
    if not any("again" in name for name in there):
        # Each repeat has its own schedules, and both servers the same.
        assert len({run["schedule_sha256"] for run in content["runs"]}) == 2 * 2
        assert {tuple(run["window"]) for run in content["runs"]} == {(0.5, 2.5)}
    for run in content["runs"]:
        flags = f"--port {port} --itl {0.02 if run['label'] == 'fast' else 0.04}"
        assert run["server_command"].endswith(flags)
    # The same command again has nothing left to do.
    run_comparison(load_comparison(path), tmp_path / "out")
    assert "starting" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.needs("locust")
def test_servers_that_run_elsewhere_are_compared(tmp_path: Path) -> None:
    path, out = tmp_path / "ab.yaml", tmp_path / "out"
    text = (
        "title: x\nbaseline: slow\nrepeats: 1\nwarmup: 1\nside_by_side: true\nservers:\n"
        "{}traffic: [{{scenario: smoke, rates: [5], duration: 2, settle: 0, tail: 0,\n"
        "  search: {{steps: 1}}}}]\n"
    )
    servers = ""
    with mock(Timing(0.01, 0.002)) as slow, mock(Timing(0.01, 0.001)) as fast:
        for label, url, endpoint in (("slow", slow, "completions"), ("fast", fast, "chat")):
            servers += f"  - {{label: {label}, model: mock, url: '{url}', endpoint: {endpoint}}}\n"
        path.write_text(text.format(servers))
        run_comparison(load_comparison(path), out)
        content = json.loads((out / "report.json").read_text())
        assert {(run["base_url"], run["endpoint"], run["start"]) for run in content["runs"]} == {
            (slow, "completions", slow),
            (fast, "chat", fast),
        }
    assert content["fairness"] == ""  # who knows what else runs there
    # Repeats of a run whose client did not keep up are beside what everybody has.
    made = [run["directory"] for run in content["runs"] if "again" not in run["directory"]]
    assert {name for name in made if "search" not in name} == {
        f"{label}-1-smoke-5-per-second" for label in ("slow", "fast")
    }
    searched = {name.split("-")[0] for name in made if "search" in name}
    if not content["fails"]["invalid"]:  # only of what a valid run told
        assert searched == {"slow", "fast"}
