"""Reads what Weights & Biases keeps of an offline run, as JSON lines on stdout; run by a Python that has the library.

`python wandb_reader.py FILE.wandb`: a log of 32 KiB blocks, each record with checksum (4 bytes), length (2) and type (1: whole,
2, 3, 4: first, middle, last part). What is in a record only the library's own schema knows.
"""

import json
import sys
from pathlib import Path

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK, HEAD = 7, 1 << 15, 7
WHOLE, LAST = 1, 4


def records(data: bytes):
    """The records' bytes, put together."""
    place, parts = HEADER, []
    while place + HEAD <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEAD:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + HEAD : place + HEAD + length])
        place += HEAD + length
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
            parts = []


def main() -> None:
    """One line a record: what it is, and the values of a point."""
    for data in records(Path(sys.argv[1]).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        told = {"kind": kind}
        if kind == "history":
            told["values"] = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
        if kind == "run":
            told |= {"project": record.run.project, "id": record.run.run_id}
        if kind == "alert":
            told |= {"title": record.alert.title, "text": record.alert.text}
        if kind == "metric":
            told |= {"glob": record.metric.glob_name, "axis": record.metric.step_metric}
        sys.stdout.write(json.dumps(told) + "\n")


main()
