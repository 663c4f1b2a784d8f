"""Wrong uses of every command: a sentence that helps, the exit code of the contract, and never a traceback."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from ftrain.cli import entry, slips
from ftrain.cli.entry import COMMANDS, cli
from ftrain.cli.reference import walk
from ftrain.cli.types import PLACE
from ftrain.starter import Facts, text
from recovery.codes import ExitCode
from tests.ledgers import Story, config

pytestmark = pytest.mark.usefixtures("no_mounts_of_its_own")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a run that has a ledger and no checkpoint, and one whose ledger is damaged."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "my.toml").write_text(text(Facts(cores=1), url=str(folder / "runs/mine")))
    (folder / "here.sh").touch(mode=0o755)
    Story(config()).start().steps(5).end().write(folder / "runs/mine")
    Story(config()).start().write(folder / "runs/spoilt").write_bytes(b"\xff no event\n")
    return folder


def use(place: Path, words: str) -> Result:
    """One command, its paths relative to the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return CliRunner().invoke(cli, words.split(), catch_exceptions=False)


USES: dict[str, list[tuple[str, int, str]]] = {
    "run": [
        ("run nothere.toml", 3, "cannot be read"),
        ("run my.toml --set run.stepz=3 --dry-run", 3, "did you mean `steps`"),
        ("run my.toml --set run.url=s3:// --dry-run", 0, "s3://"),
        ("run my.toml --set run.url=s3://", 5, "names no place"),
        ("run my.toml --set run.url=http://127.0.0.1:1/x", 3, "allowed: a folder, file://, s3://"),
        ("run my.toml --set run.url=memory://x --dry-run", 3, "no other sees what is there"),
        ("run my.toml --set run.url=s3:/bucket/key --dry-run", 3, "write s3://bucket/key"),
        ("run my.toml --set run.url=/proc/x", 5, "no folder can be made there"),
        ("run my.toml --from runs/nothing --set run.url=runs/new", 4, "nothing is there"),
        ("run my.toml --from runs/mine@newest --set run.url=runs/new", 4, "STEP is a number, as in runs/mine@100"),
        ("run my.toml --from runs/mne@7 --set run.url=runs/new", 4, "Did you mean `runs/mine`?"),
        ("run my.toml --json", 2, "--dry-run"),
        ('run my.toml --set certify.layouts=["tp=x"] --dry-run', 3, """certify.layouts.0: given "tp=x": tp: given 'x'"""),
        ("run my.toml --set run.url=runs/spoilt", 4, "move the segment away"),
    ],
    "supervise": [
        ("supervise", 2, "Missing argument"),
        ("supervise --nproc 0 -- true", 2, "x>=1"),
        ("supervise --hang-s -1 -- true", 2, "x>0"),
        ("supervise --max-restarts -1 -- true", 2, "x>=0"),
        ("supervise --master-port 99999999 -- true", 2, "65535"),
        ("supervise --webhook nonsense -- true", 3, "http"),
        ("supervise -- nothere-at-all", 3, "no program"),
        ("supervise -- my.toml", 3, "the file may not be executed; a script follows its interpreter: python my.toml"),
        ("supervise -- runs", 3, "it is a folder"),
        ("supervise -- here.sh", 3, "./here.sh"),
    ],
    "status": [
        ("status runs/mne", 2, "Did you mean `runs/mine`?"),
        ("status my.toml", 2, "It is a config; its run is"),
        ("status runs/spoilt", 4, "spoilt is damaged: e0000-000000.jsonl, line 1"),
    ],
    "save": [("save runs/nothing", 2, "no live run")],
    "stop": [("stop runs/mine", 2, "the run is not running")],
    "drain": [("drain runs/mine 0", 2, "the run is not running")],
    "admit": [("admit runs/mine", 2, "Missing argument")],
    "resize": [
        ("resize runs/mine --ranks 0", 2, "x>=1"),
        ("resize runs/mine --ranks 1 --set parallel.ranks=2", 2, "give one of them"),
    ],
    "join": [("join my.toml", 2, "is a file")],
    "submit": [("submit my.toml", 2, "--slurm"), ("submit my.toml --slurm --dry-run", 3, "machine.ranks_per_node")],
    "report": [
        ("report runs/mne", 2, "Did you mean `runs/mine`?"),
        ("report my.toml", 2, "It is a config"),
        ("report runs/mine --attempt 7", 2, "attempts: 0"),
        ("report runs/mine --attempt 0 --html x.html", 2, "give one of them"),
        ("report runs/mine --html nodir/x.html", 2, "cannot be written"),
        ("report foo://x", 2, "foo:// is not known to fsspec; give a folder, file://, s3://"),
        ("report runs/spoilt", 4, "spoilt is damaged: e0000-000000.jsonl, line 1"),
    ],
    "compare": [
        ("compare runs/mine runs/mne", 2, "runs/mne: no ledger of a run is there"),
        ("compare runs/mine", 2, "RUN_B"),
        ("compare runs/mine runs/spoilt", 4, "spoilt is damaged"),
    ],
    "watch": [
        ("watch runs/mine@5 --once", 2, "RUN has no step: runs/mine"),
        ("watch runs/mne --once", 2, "Did you mean `runs/mine`?"),
        ("watch runs/spoilt --once", 4, "spoilt is damaged"),
    ],
    "metrics": [
        ("metrics runs/mine", 2, "--tensorboard"),
        ("metrics runs/nothing --tensorboard tb", 2, "no ledger"),
        ("metrics runs/mine --tensorboard my.toml", 2, "cannot be written"),
        ("metrics runs/spoilt --tensorboard tb", 4, "spoilt is damaged"),
    ],
    "ckpt cp": [("ckpt cp runs/mine@7 copy", 4, "no checkpoint of step 7")],
    "ckpt diff": [("ckpt diff runs/mine runs/nothing", 4, "no checkpoint")],
    "ckpt export": [
        ("ckpt export runs/mine out", 2, "--to"),
        ("ckpt export runs/mine --to safetensors out --compress", 2, "export --to zarr"),
        ("ckpt export runs/mine@7 --to safetensors out", 4, "no checkpoint of step 7"),
    ],
    "ckpt gc": [
        ("ckpt gc runs/mine --keep-last 1", 4, "runs/mine: no checkpoint is there yet"),
        ("ckpt gc runs/mne --keep-last 1", 4, "Did you mean `runs/mine`?"),
        ("ckpt gc runs/mine --keep-last 0", 2, "x>=1"),
    ],
    "ckpt heal": [
        ("ckpt heal runs/mine", 2, "URL@STEP"),
        ("ckpt heal runs/mne@3", 4, "runs/mne: no checkpoint is there, nor a run. Did you mean `runs/mine`?"),
    ],
    "ckpt import": [
        ("ckpt import --from safetensors nothere runs/imported", 5, "nothere: there is no such folder; give the folder"),
        ("ckpt import --from dcp nothere runs/imported --config my.toml", 5, "nothere: there is no such folder"),
        ("ckpt import --from safetensors my.toml runs/imported", 5, "my.toml: there is a file; give the folder"),
        ("ckpt import --from safetensors runs runs/imported", 5, "has no config.json: give the model with --config"),
        ("ckpt import --from dcp memory://nothere runs/imported --config my.toml", 5, "memory://nothere: nothing is there"),
        ("ckpt import --from safetensors memory://nothere runs/imported", 5, "memory://nothere: nothing is there"),
    ],
    "ckpt ls": [
        ("ckpt ls", 2, "Missing argument"),
        ("ckpt ls runs/mine", 0, "runs/mine: no checkpoint is there yet"),
        ("ckpt ls runs/mne", 4, "no checkpoint is there, nor a run. Did you mean `runs/mine`?"),
    ],
    "ckpt show": [
        ("ckpt show runs/mine@7", 4, "no checkpoint of step 7"),
        ("ckpt show runs/mine@²", 4, "STEP is a number, as in runs/mine@100"),
        (f"ckpt show runs/mine@{'9' * 5000}", 5, "name too long"),
        ("ckpt show runs/mine@newest", 4, "STEP is a number, as in runs/mine@100"),
        ("ckpt show runs/mne@7", 4, "Did you mean `runs/mine`?"),
    ],
    "ckpt verify": [
        ("ckpt verify runs/mine --sample 2", 2, "0<x<=1"),
        ("ckpt verify runs/mine@7", 4, "no checkpoint of step 7"),
    ],
    "ckpt view": [("ckpt view runs/mine@7", 4, "no checkpoint of step 7")],
    "sample": [
        ("sample runs/mine", 4, "no checkpoint"),
        ("sample runs/mine --temperature -1", 2, "x>=0"),
        ("sample runs/mine@7", 4, "no checkpoint of step 7"),
        (f"sample runs/mine --seed {2**63}", 2, "9223372036854775807"),
    ],
    "data inspect": [("data inspect nothere.toml", 3, "cannot be read"), ("data inspect my.toml --count 0", 2, "1<=x<=10000")],
    "data prepare": [
        ("data prepare nothere --out x", 3, "no such file"),
        ("data prepare my.toml --out o/", 2, "--out 'o/' is a folder: give a prefix, as in o/mine"),
        ("data prepare my.toml --out ..", 2, "give a prefix, as in ../mine"),
        ("data prepare my.toml --out x --tokenizer words", 3, "tokenizer.json"),
    ],
    "plan checkpoint": [
        ("plan checkpoint my.toml --stall -1", 2, "x>=0"),
        ("plan checkpoint my.toml --rate -2", 2, "x>=0"),
        ("plan checkpoint my.toml --failures nope", 3, "llama3"),
    ],
    "plan explain": [
        ("plan explain my.toml --rank 99", 3, "ranks 0 to"),
        ("plan explain my.toml --rank -9", 2, "x>=0"),
        ("plan explain my.toml --place 1,2", 3, "STAGE,CARD,REPLICA"),
        ("plan explain my.toml --topic tp --svg x.svg", 2, "only zero1 has a picture"),
        ("plan explain my.toml --topic zero1 --html x.html", 2, "none a page"),
    ],
    "plan memory": [
        ("plan memory my.toml --hardware h10", 3, "h100"),
        ("plan memory my.toml --params nan", 2, "no number"),
        ("plan memory my.toml --peak -1", 2, "x>=0"),
        ("plan memory my.toml --hardware my.toml", 3, "hardware profile my.toml"),
    ],
    "plan schedule": [
        ("plan schedule my.toml --stages -3", 2, "x>=0"),
        ("plan schedule my.toml --svg nodir/x", 2, "mkdir -p nodir"),
    ],
    "plan search": [("plan search my.toml --top 0", 2, "x>=1"), ("plan search my.toml", 3, "--peak")],
    "plan simulate": [
        ("plan simulate my.toml --days inf", 2, "no number"),
        ("plan simulate my.toml --assume foo=1", 3, "there is no 'foo'"),
        ("plan simulate my.toml --measured runs/nothing", 3, "runs/nothing"),
    ],
    "plan time": [
        ("plan time my.toml --tokens -1", 2, "x>=0"),
        ("plan time my.toml --against parallel.ppp=2", 3, "did you mean"),
    ],
    "plan traffic": [("plan traffic my.toml --size -5", 2, "x>=0")],
    "certify": [
        ("certify my.toml --modes fp65", 2, "fp64, fp32, bf16"),
        ("certify my.toml --layouts tp", 3, "key=value"),
        ("certify my.toml --layouts tp=x", 3, "whole number"),
        ("certify my.toml --out nodir/x.json", 2, "mkdir -p nodir"),
        ("certify my.toml --out runs", 2, "is a directory"),
        ('certify my.toml --set certify.layouts=["tp=x"] --layouts tp', 3, '  tp: given "tp"; allowed: key=value'),
    ],
    "classify": [("classify nothere", 2, "does not exist")],
    "doctor": [("doctor nothere.toml", 3, "cannot be read"), ("doctor my.toml --measure x.json", 2, ".toml")],
    "drill": [
        ("drill my.toml --faults kll", 2, "'kll' is no kind of fault (did you mean worker-kill or"),
        (
            "drill my.toml --faults worker-kill,typo",
            2,
            "--faults: 'typo' is no kind of fault. `ftrain drill CONFIG --faults help`",
        ),
        ("drill my.toml --minutes 0", 2, "x>=0.1"),
        ("drill my.toml --folder runs", 3, "holds what no drill has left there: mine"),
        ("drill my.toml --folder my.toml", 2, "is a file"),
    ],
    "init": [("init my.toml", 2, "there already"), ("init nodir/x.toml", 2, "cannot be written")],
    "completion": [("completion fishy", 2, "'bash', 'zsh', 'fish'")],
}


def test_every_command_has_a_wrong_use() -> None:
    """A command that is added is added here."""
    assert {" ".join(path) for path, _ in walk(cli, ())} == set(USES)


@pytest.mark.parametrize(
    ("words", "code", "said"), [use for uses in USES.values() for use in uses], ids=lambda it: str(it)[:50]
)
def test_a_wrong_use_is_answered_in_words(place: Path, words: str, code: int, said: str) -> None:
    done = use(place, words)
    assert done.exit_code == code, done.output
    assert said in done.output, done.output


PLACES = [
    pytest.param(path, index, id=f"{' '.join(path)} {it.name}")
    for path, command in walk(cli, ())
    for index, it in enumerate(it for it in command.params if isinstance(it, click.Argument))
    if it.type is PLACE
]
"""Arguments that are a run, a checkpoint, or a place to write to."""


@pytest.mark.parametrize(("path", "index"), PLACES)
def test_a_scheme_that_no_run_can_be_at_is_refused_before_anybody_is_asked(
    place: Path, path: tuple[str, ...], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of FTP would ask for four minutes where the server is; `memory://` would be searched in this very process."""
    command = next(command for other, command in walk(cli, ()) if other == path)
    arguments = ["runs/mine" for it in command.params if isinstance(it, click.Argument)]
    monkeypatch.setattr("socket.getaddrinfo", lambda *given, **more: pytest.fail(f"asked for {given}"))
    for url in ("ftp://nowhere/x", "memory://x"):
        arguments[index] = url
        done = use(place, " ".join((*path, REQUIRED.get(" ".join(path), ""), *arguments)))
        assert done.exit_code == ExitCode.USAGE, done.output
        assert url in done.output
        assert "s3://" in done.output


def test_a_run_that_is_there_is_not_suggested_for_itself(place: Path) -> None:
    assert "Did you mean" not in use(place, "ckpt show runs/mine@7").output


TYPED = [
    pytest.param(path, option, id=f"{' '.join(path)} {option.opts[0]}")
    for path, command in walk(cli, ())
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag and not isinstance(option.type, click.types.StringParamType)
    if not isinstance(option.type, click.Path)
]
"""Options whose values click itself can tell from others: numbers, ranges, choices."""


@pytest.mark.parametrize(("path", "option"), TYPED)
def test_a_value_of_the_wrong_kind_names_its_option(place: Path, path: tuple[str, ...], option: click.Option) -> None:
    done = use(place, f"{' '.join(path)} {option.opts[0]} garbage my.toml runs/mine")
    assert done.exit_code == 2, done.output
    assert f"'{option.opts[0]}'" in done.output, done.output


@pytest.mark.parametrize(("path", "option"), [it for it in TYPED if isinstance(it.values[1].type, click.FloatRange)])
def test_no_number_is_not_a_number(place: Path, path: tuple[str, ...], option: click.Option) -> None:
    """`nan` lies in every range of click's: whoever counts with it counts wrong without noticing."""
    done = use(place, f"{' '.join(path)} {option.opts[0]} nan my.toml runs/mine")
    assert done.exit_code == 2, done.output
    assert f"'{option.opts[0]}'" in done.output, done.output


REQUIRED = {
    "submit": "--slurm",
    "ckpt export": "--to zarr",
    "ckpt import": "--from dcp",
    "data prepare": "--out x",
}


@pytest.mark.parametrize("path", [path for path, _ in walk(cli, ())], ids=" ".join)
def test_an_empty_word_is_never_the_folder_one_stands_in(place: Path, path: tuple[str, ...]) -> None:
    """`ftrain stop "$RUN"` where RUN is not set, in the folder of a run."""
    command = next(command for other, command in walk(cli, ()) if other == path)
    arguments = ["" for it in command.params if isinstance(it, click.Argument)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place / "runs" / "mine")
        before = sorted(Path().rglob("*"))
        done = CliRunner().invoke(cli, [*path, *REQUIRED.get(" ".join(path), "").split(), *arguments], catch_exceptions=False)
        assert sorted(Path().rglob("*")) == before
    assert done.exit_code in (ExitCode.USAGE, ExitCode.CONFIG), done.output


@pytest.mark.parametrize("words", ["run my.toml --from", "ckpt heal runs/mine@5 --from", "ckpt view runs/mine --to"])
def test_an_empty_place_of_an_option_is_not_as_if_it_were_not_given(place: Path, words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = CliRunner().invoke(cli, [*words.split(), ""], catch_exceptions=False)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "it is empty" in done.output


@pytest.mark.parametrize("words", ["status ~nobody-here/x", "report ~nobody-here/x", "ckpt show ~nobody-here/x"])
def test_a_home_that_nobody_has_is_a_place_where_nothing_is(place: Path, words: str) -> None:
    done = use(place, words)
    assert done.exit_code in (ExitCode.USAGE, ExitCode.DAMAGED), done.output
    assert "~nobody-here/x" in done.output


def test_every_help_ends_in_an_example() -> None:
    for path, command in walk(cli, ()):
        shown = command.get_help(click.Context(command, info_name=" ".join(path)))
        title, example = shown.rpartition("\n\n")[::2]
        assert example.strip().startswith("Example"), shown
        assert f"ftrain {' '.join(path)}" in example, shown
        assert title


def examples() -> set[str]:
    """The command lines of all helps."""
    shown = [command.get_help(click.Context(command)) for command in (cli, *(each for _, each in walk(cli, ())))]
    return {line.strip() for text in shown for line in text.splitlines() if line.strip().startswith("ftrain ")}


def test_examples_name_no_file_that_only_the_source_tree_has() -> None:
    """Who has installed a wheel begins with `ftrain init`."""
    assert "ftrain init" in examples()
    named = {word for line in examples() for word in shlex.split(line) if word.endswith(".toml")}
    assert named <= {"ftrain.toml", "my.toml", "here.toml"}
    assert not [line for line in examples() if "configs" in line]


def test_examples_that_start_nothing_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, those of commands that only tell; the rest is in the guides, whose blocks are run."""
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["init"]).exit_code == 0
    told = [line for line in examples() if "--dry-run" in line or (line.startswith("ftrain plan") and "ftrain.toml" in line)]
    assert len(told) >= 10
    for line in told:
        done = CliRunner().invoke(cli, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}: {done.output}"


@pytest.mark.parametrize("words", ["--help", "ckpt --help", "data --help", "plan --help"])
def test_a_group_ends_in_an_example_too(place: Path, words: str) -> None:
    assert use(place, words).output.rpartition("\n\n")[2].strip().startswith("Example")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_half_typed_command_is_recognised(place: Path, name: str) -> None:
    done = use(place, name[:-1])
    assert done.exit_code == 2
    assert "Did you mean" in done.output


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train my.toml", "Did you mean 'run'?"),
        ("resume my.toml", "Did you mean 'run'?"),
        ("rnu my.toml", "Did you mean 'run'?"),
        ("reprot runs/mine", "Did you mean 'report'?"),
        ("frobnicate", "Commands: run, supervise, "),
        ("run my.toml --resume", "`ftrain run CONFIG` goes on with a run that exists"),
        ("run my.toml --nproc 2", "--set parallel.ranks=N"),
        ("run my.toml --dryrun", "Did you mean '--dry-run'?"),
        ("ckpt ls runs/mine --jsn", "Did you mean '--json'?"),
        ("supervise --nproc-per-node 2 -- true", "Did you mean '--nproc'?"),
    ],
)
def test_what_was_meant_is_said(place: Path, words: str, meant: str) -> None:
    done = use(place, words)
    assert done.exit_code == 2
    assert meant in done.output


def test_a_word_that_only_has_letters_in_common_is_not_suggested(place: Path) -> None:
    for words in ("run my.toml --zeal", "frobnicate", "status runs/mine --resume"):
        done = use(place, words)
        assert done.exit_code == 2
        assert "Did you mean" not in done.output


def test_every_word_of_another_program_leads_to_a_command_of_ours() -> None:
    assert set(slips.COMMANDS.values()) <= set(COMMANDS)
    assert not set(slips.COMMANDS) & set(COMMANDS)
    ours = {(path[-1], option) for path, command in walk(cli, ()) for it in command.params for option in it.opts}
    assert not set(slips.OPTIONS) & ours


def test_a_fault_of_ours_keeps_its_traceback_out_of_sight(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an exception that no command expects a sentence is told; the rest is in a file."""

    def broken(**given: object) -> None:
        raise KeyError("config")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "cli", broken)
        patch.setattr(sys, "flags", SimpleNamespace(safe_path=True))
        with pytest.raises(SystemExit) as left:
            entry.main(["status", "runs/mine"])
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert "Traceback" not in said
    kept = re.search(r"stands in (\S+);", said)
    assert kept
    assert "Traceback" in Path(kept[1]).read_text()
    Path(kept[1]).unlink()


def test_a_rank_that_is_no_number_is_no_fault_of_ours(place: Path) -> None:
    (place / "odd.json").write_text('{"exit": {"²": 1, "0": 1}, "log": ["x"]}', encoding="utf-8")
    assert use(place, "classify odd.json").exit_code == 0


def test_a_word_that_cannot_be_recorded_is_refused(place: Path) -> None:
    done = use(place, "data prepare my.toml --out tokens/\udcff")
    assert done.exit_code == ExitCode.USAGE
    assert "not UTF-8" in done.output
    assert not (place / "tokens").exists()


@pytest.mark.parametrize("option", ["--stall 1e308", "--rate 1e-320", "--store-gb-s 1e-320"])
def test_figures_that_lead_to_no_figure_are_told(place: Path, option: str) -> None:
    done = use(place, f"plan checkpoint my.toml {option}")
    assert done.exit_code == ExitCode.CONFIG, done.output
    assert "a cluster may have" in done.output


def test_a_folder_that_was_deleted_under_the_shell_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(gone)
        gone.rmdir()
        patch.setattr(entry, "cli", lambda **given: Path("runs/mine").absolute())
        patch.setattr(sys, "flags", SimpleNamespace(safe_path=True))
        with pytest.raises(SystemExit) as left:
            entry.main([])
    said = capsys.readouterr().err
    assert left.value.code == ExitCode.STORAGE, said
    assert "is not there any more" in said


def test_a_path_that_cannot_be_used_is_named_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def denied(**given: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "cli", denied)
        patch.setattr(sys, "flags", SimpleNamespace(safe_path=True))
        with pytest.raises(SystemExit) as left:
            entry.main([])
    assert left.value.code == ExitCode.STORAGE
    assert capsys.readouterr().err == "/somewhere: Permission denied\n"
