"""Saves a state every few milliseconds until it is killed: python -m tests.storage.report_writer FOLDER FIRST_STEP"""

import sys

from storage.local import LocalStore
from storage.run import RunStore
from tests.storage.building import SPECS, random_values, save


def main(folder: str, first: int) -> None:
    run = RunStore(LocalStore(folder))
    epoch = run.take_epoch(owner={}, starts_from="newest")
    step = first
    while True:
        save(run, random_values(SPECS, step), step=step, epoch=epoch, writers=3)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        step += 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
