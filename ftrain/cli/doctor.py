"""`ftrain doctor`: is this machine fit for that run?

ftrain doctor ftrain.toml
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ftrain.cli import render
from ftrain.cli.output import PROFILE, OutputFile, write
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path(dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the config (TOML syntax).")
@click.option(
    "--measure",
    type=OutputFile(PROFILE),
    metavar="FILE",
    help="Instead: gauge this machine, and write a hardware profile to FILE, which may hold an earlier one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(config_path: str, overrides: tuple[str, ...], measure: Path | None, as_json: bool) -> None:
    """Check this machine for the run that CONFIG describes: disk, memory, data, network, storage, clocks, devices, time limits.

    Each check runs in a process of its own that is killed if it does not answer. Leaves with 3 if the data do not fit the
    config, with 5 if storage is at fault, with 11 if the machine is.

    \b
    Examples:
      ftrain doctor ftrain.toml
      ftrain doctor my.toml --measure here.toml && ftrain plan time my.toml --hardware here.toml
    """
    from ftrain.compose.checks import DATA, results
    from ftrain.compose.launch import with_absolute_url
    from ftrain.load import load

    if measure:
        write_profile(config_path, overrides, measure, as_json=as_json)
        return
    with told():
        found = results(with_absolute_url(load(config_path, overrides)), everything=True)
    if as_json:
        render.json(found)
    else:
        render.table(
            ("check", "answer", "seconds", "what was found"),
            [
                (it.name, it.status, f"{it.seconds:.2f}", it.text + (f"; {it.remedy}" if it.bad and it.remedy else ""))
                for it in found
            ],
        )
    if any(result.name == DATA and result.status == "failed" for result in found):
        sys.exit(ExitCode.CONFIG)
    bad = {result.name for result in found if result.bad}
    if bad:
        sys.exit(ExitCode.STORAGE if bad <= {"storage", "clock"} else ExitCode.RETRY_ELSEWHERE)


def write_profile(config_path: str, overrides: tuple[str, ...], path: Path, *, as_json: bool) -> None:
    """Measure, write, and say how to use it."""
    from ftrain.compose.gauge import as_toml, gauge
    from ftrain.load import load

    if path.suffix != ".toml":
        render.fail(f"--measure {path}: a profile is a .toml file", ExitCode.USAGE)
    with told():
        profile = gauge(load(config_path, overrides))
    write(path, PROFILE, as_toml(profile))
    if as_json:
        render.json(profile)
        return
    gpu, server = profile.gpu, profile.server
    render.data(f"a rank: {profile.peak_text}, {100 * profile.assumed.kernel_share:.0f} % of it at the model's own sizes")
    render.data(f"memory: {gpu.memory_gb:g} GB a rank, {gpu.memory_gb_s:g} GB/s; loopback {server.link_gb_s_per_lane:g} GB/s")
    render.note(f'wrote {path}; use it: --hardware {path}, or hardware = "{path}" in [machine], which also gives an MFU')
