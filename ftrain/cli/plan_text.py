"""A plan's answer as text: what `ftrain plan` prints without --json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftrain.cli import render

if TYPE_CHECKING:
    from ftrain.plan.figure import Answer, Section, Table


def show_text(answer: Answer, *, explain: bool) -> None:
    """The whole answer; `explain`: with formula, inputs and source of every number."""
    render.data(answer.title)
    for section in answer.sections:
        if section.title != answer.title:  # a worked example is one section, which the answer is named after
            render.data(f"\n{section.title}")
        _section(section, explain=explain)
    for warning in answer.warnings:
        render.data(f"\nwarning: {warning}")
    for refusal in answer.refusals:
        render.data(f"\nrefused: {refusal}")


def _section(section: Section, *, explain: bool) -> None:
    width = max((len(figure.label) for figure in section.figures), default=0)
    for figure in section.figures:
        render.data(f"  {figure.label.ljust(width)}  {figure.text}")
        if explain:
            from ftrain.plan.figure import plain

            inputs = ", ".join(f"{name} = {plain(value)}" for name, value in figure.why.inputs.items())
            render.data(f"  {''.ljust(width)}    = {figure.why.formula}" + (f"; {inputs}" if inputs else ""))
            render.data(f"  {''.ljust(width)}    source: {figure.why.source}")
    if section.drawing:
        render.data("\n" + section.drawing)
    for table in section.tables:
        _table(table, explain=explain)
    for note in section.notes:
        render.data(f"  note: {note}")


def _table(table: Table, *, explain: bool) -> None:
    if not table.rows:
        render.data(f"\n  {table.title}: nothing")
        return
    render.data(f"\n  {table.title}")
    render.table([f"  {table.columns[0]}", *table.columns[1:]], [[f"  {row[0]}", *row[1:]] for row in table.rows])
    if explain:
        for name, formula in table.formulas.items():
            render.data(f"      {name} = {formula}")
        if table.source:
            render.data(f"      source: {table.source}")
