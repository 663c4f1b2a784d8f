"""`ftrain classify` as scripts use it: JSON or JSON lines in, one verdict a line out, in the published form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from ftrain.cli.classify import classify
from recovery.evidence import ErrorReport

FIELDS = {
    "id",
    "class",
    "component",
    "planned",
    "first_failing_rank",
    "retryable",
    "action",
    "confidence",
    "reason",
    "evidence",
}
OOM = {"id": "a", "exit": {"0": -15, "1": -9}, "kernel": ["Out of memory: Killed process 4 (python) total-vm:1kB"]}
CRASH = {"id": "b", "exit": {"0": -11}, "log": ["Segmentation fault (core dumped)"], "label": {"class": "ignored"}}


def run(tmp_path: Path, text: str, *options: str) -> list[str]:
    file = tmp_path / "cases"
    file.write_text(text)
    result = CliRunner().invoke(classify, [str(file), *options])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\n".join(map(json.dumps, [OOM, CRASH])) + "\n", id="lines"),
        pytest.param(json.dumps([OOM, CRASH], indent=2), id="array"),
    ],
)
def test_one_verdict_a_line_in_the_published_form(tmp_path: Path, text: str) -> None:
    first, second = map(json.loads, run(tmp_path, text, "--json"))
    assert set(first) == set(second) == FIELDS
    assert (first["id"], first["class"], first["first_failing_rank"]) == ("a", "host_oom", 1)
    assert first["evidence"][0] == {"where": "kernel", "line": 0, "text": OOM["kernel"][0]}
    assert (second["id"], second["class"]) == ("b", "process_crash")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(json.dumps, id="array"),
        pytest.param(lambda cases: "\n".join(map(json.dumps, cases)), id="lines"),
        pytest.param(lambda cases: json.dumps(cases[0], indent=2), id="object"),
    ],
)
def test_a_field_that_nobody_looks_at_is_told_once(tmp_path: Path, form: Callable[[object], str]) -> None:
    beside = {"label": {}, "accept": {}, "why": "", "tricky": "", "source": "", "grounding": "", "set": 1}
    case = {"exit": {"0": 1}, "logs": ["x"], "dmesg": [], **beside}
    file = tmp_path / "cases"
    file.write_text(form([case, case]))
    result = CliRunner().invoke(classify, [str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        f"{file}: the field logs is not looked at; did you mean log?",
        f"{file}: the field dmesg is not looked at; known: id, exit, log, kernel, scheduler, ours, order, nodes, steps, notes",
    ]


def test_the_lines_before_one_that_is_no_case_have_their_verdicts(tmp_path: Path) -> None:
    file = tmp_path / "cases"
    file.write_text("\n".join([json.dumps(OOM), json.dumps(CRASH), "no case"]))
    result = CliRunner().invoke(classify, [str(file), "--json"])
    assert result.exit_code == 2
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["a", "b"]
    assert "line 3: not a case" in result.stderr


@pytest.mark.parametrize("name", ["interruptions.jsonl", "unseen.jsonl", "composed.jsonl"])
def test_the_open_cases_have_no_such_field(name: str) -> None:
    result = CliRunner().invoke(classify, [str(Path(__file__).parents[2] / "recovery/cases" / name), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_pretty_printed_object_is_one_case(tmp_path: Path) -> None:
    (line,) = run(tmp_path, json.dumps(OOM, indent=2), "--json")
    assert json.loads(line)["class"] == "host_oom"


def test_reasons_for_people_and_for_scripts(tmp_path: Path) -> None:
    case = {"exit": {"0": 1}, "log": ["For debugging consider passing CUDA error: 700", "MemoryError"]}
    text = "\n".join(run(tmp_path, json.dumps(case), "--explain"))
    assert "weighed" in text
    assert "advice, not an event" in text
    (line,) = run(tmp_path, json.dumps(case), "--explain", "--json")
    assert {"considered", "discarded"} <= set(json.loads(line))


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="at once"),
        pytest.param("\n\n", id="blank lines first"),
        pytest.param("[rank0]: starting\n[rank1]: starting\n", id="a prefix like an array"),
        pytest.param("[2026-01-31 10:00:00] starting\n", id="a time like an array"),
        pytest.param('{"ts": 1.5, "level": "INFO", "rank": 0, "scheduler": "cosine", "msg": "starting"}\n', id="JSON lines"),
        pytest.param(
            '{"ts": 1, "msg": "job a", "exit": 0}\n{"ts": 2, "msg": "job b", "exit": 1}\n', id="JSON lines with an exit"
        ),
        pytest.param("{'loss': 0.97, 'epoch': 1.2}\n", id="what Python prints of a dict"),
        pytest.param("\x1b[32mstarting\x1b[0m \udcff\n", id="colour and no UTF-8"),
    ],
)
def test_a_plain_log_is_one_case_named_like_the_file(tmp_path: Path, before: str) -> None:
    file = tmp_path / "train.log"
    line = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    file.write_text(f"{before}{line}\n", errors="surrogateescape")
    result = CliRunner().invoke(classify, [str(file), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert (said["id"], said["class"], said["first_failing_rank"]) == ("train.log", "cuda_oom", 1)
    assert said["evidence"][0] == {"where": "log", "line": before.count("\n"), "text": line}


def test_what_a_worker_wrote_of_its_exception_is_read_as_its_own_words(tmp_path: Path) -> None:
    told = ErrorReport(type="ZeroDivisionError", message="division by zero", traceback="", t=1.0, rank=3, attempt=0)
    file = tmp_path / "rank-00003.error.json"
    file.write_bytes(msgspec.json.encode(told))
    result = CliRunner().invoke(classify, [str(file), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert (said["id"], said["class"], said["first_failing_rank"]) == (file.name, "software_error", 3)
    assert said["evidence"][0]["text"] == "[rank3]: ZeroDivisionError: division by zero"


def test_of_an_empty_file_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.touch()
    result = CliRunner().invoke(classify, [str(file)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert "train.log: nothing stands in it" in result.stderr


def test_a_log_from_a_pipe() -> None:
    result = CliRunner().invoke(classify, ["-", "--json"], input="CUDA out of memory. Tried to allocate 1 GiB\n")
    assert (json.loads(result.output)["id"], json.loads(result.output)["class"]) == ("stdin", "cuda_oom")


def test_of_a_large_log_the_end_is_read_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftrain.cli.classify.LOG_BYTES", 100)
    file = tmp_path / "train.log"
    file.write_text("CUDA out of memory. Tried to allocate 1 GiB\n" + "waiting\n" * 50 + "KeyError: 'x'\n")
    result = CliRunner().invoke(classify, [str(file), "--json"])
    assert "the last 100 of " in result.stderr
    said = json.loads(result.stdout)
    assert (said["class"], said["evidence"][0]["line"]) == ("software_error", 10)  # 100 bytes: a cut line, 10 more, the last


@pytest.mark.parametrize("text", ['{"exit": {"0": -9', '[{"exit": {"0": -9}}', '{"exit": 3}', "["])
def test_broken_json_is_no_log(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cases.json"
    file.write_text(text)
    assert CliRunner().invoke(classify, [str(file)]).exit_code == 2


def test_json_that_is_nested_too_deeply_is_no_fault_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text('{"log": [], "other": ' + "[" * 100_000)
    result = CliRunner().invoke(classify, [str(file)])
    assert result.exit_code == 2
    assert "nested so deeply" in result.output


def test_what_is_no_case_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "cases"
    file.write_text(json.dumps(OOM) + "\nnonsense\n")
    result = CliRunner().invoke(classify, [str(file)])
    assert result.exit_code == 2
    assert "line 2" in result.output
