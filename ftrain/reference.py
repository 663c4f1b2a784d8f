"""Writes the config reference from the schema, so that the two cannot disagree: `python -m ftrain.reference > docs/config.md`.

A test compares the file with this text. What a field means stands in `ftrain.config` and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast

from msgspec import inspect as mi

from ftrain.config import Config
from ftrain.schema import allowed, bare, default_text, description, resume_class

_HEAD = """# Config reference

Generated from the schema by `python -m ftrain.reference`; edit `ftrain/config.py` instead.

A config is a TOML file. Precedence: the defaults below, then the file, then `--set a.b=v` (the value in TOML syntax; a bare
word is text; items that a list has by their number: `--set data.sources.0.weight=2`). Unknown keys are errors.
`ftrain run CONFIG --dry-run` prints the resolved config.

Errors are told together: unknown keys, wrong types and values, a `machine.hardware` that is no profile, and values that cannot
go together (if none of them is wrong by itself). Two kinds come only when these are mended: what follows for `[[phases]]` and
`certify.layouts`, each of which is a whole config, and what a start looks for on the machine: the data, GPUs, room on disks.

"On resume" says what happens when an existing run is resumed with another value: **free** takes effect; **recorded** takes
effect and stands in the ledger; **accept** changes what is trained and needs `--accept-change`; **refused** needs a new run.
"""


def reference() -> str:
    """The whole page."""
    return _HEAD + "".join(f"\n{section}" for section in _sections())


def _sections() -> Iterator[str]:
    for field in cast(mi.StructType, mi.type_info(Config)).fields:
        inner = bare(field.type)
        name, kind = field.encode_name, resume_class(field.type)
        if isinstance(inner, mi.StructType):
            yield _section(f"[{name}]", inner, kind)
            yield from _items(name, inner)
        elif isinstance(inner, mi.VarTupleType):
            yield _section(f"[[{name}]]", cast(mi.StructType, bare(inner.item_type)), kind)


def _items(section: str, type_: mi.StructType) -> Iterator[str]:
    """The tables inside a section's lists."""
    for field in type_.fields:
        inner = bare(field.type)
        item = bare(inner.item_type) if isinstance(inner, mi.VarTupleType) else None
        members = item.types if isinstance(item, mi.UnionType) else (item,)
        for member in members:
            if isinstance(member, mi.StructType):
                tag = f' with {member.tag_field} = "{member.tag}"' if member.tag_field else ""
                title = f"an item of {section}.{field.encode_name}{tag}"
                yield _section(title, member, resume_class(field.type))


def _section(title: str, type_: mi.StructType, kind: str) -> str:
    rows = [_row(field, kind) for field in type_.fields]
    doc = (type_.cls.__doc__ or "").strip()
    head = "| key | allowed | default | on resume | meaning |\n|---|---|---|---|---|\n"
    return f"## {title}\n\n{doc}\n\n{head}" + "\n".join(rows) + "\n"


def _row(field: mi.Field, kind: str) -> str:
    default = f"`{default_text(field)}`" if not field.required else "*required*"
    cells = (f"`{field.encode_name}`", allowed(field.type), default, resume_class(field.type, kind), description(field.type))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(reference())
