"""ftrain: training that does not care what breaks.

This module imports nothing: the supervisor's processes and every command start from it, and none of them may pay for torch.
What a training script uses is looked up when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftrain.checkpoint.checkpointer import Checkpointer
    from ftrain.checkpoint.dcp import DcpReader, DcpWriter
    from ftrain.checkpoint.per_rank import PerRank, RandomState, per_rank
    from ftrain.checkpoint.record import StateError
    from ftrain.checkpoint.script_link import SaveError
    from ftrain.supervised import progress

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "DcpReader",
    "DcpWriter",
    "PerRank",
    "RandomState",
    "SaveError",
    "StateError",
    "per_rank",
    "progress",
]

_MODULES = {
    "Checkpointer": "ftrain.checkpoint.checkpointer",
    "DcpReader": "ftrain.checkpoint.dcp",
    "DcpWriter": "ftrain.checkpoint.dcp",
    "PerRank": "ftrain.checkpoint.per_rank",
    "RandomState": "ftrain.checkpoint.per_rank",
    "SaveError": "ftrain.checkpoint.script_link",
    "StateError": "ftrain.checkpoint.record",
    "per_rank": "ftrain.checkpoint.per_rank",
    "progress": "ftrain.supervised",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    _refuse_shadows()
    return globals().setdefault(name, getattr(import_module(_MODULES[name]), name))


def _refuse_shadows() -> None:
    """A script's own `storage` or `recovery` stands before ours on the path: say so, once and clearly."""
    from importlib.util import find_spec
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    for package in ("storage", "recovery"):
        ours, spec = root / package / "__init__.py", find_spec(package)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is None and spec is not None:  # a folder without __init__.py
            found = Path(next(iter(spec.submodule_search_locations or ["?"]))).resolve()
        if found != ours.resolve():
            raise ImportError(
                f"{found} stands in front of {ours}, which ftrain needs: of two packages named {package!r} the first is found. "
                f"Rename yours, or start the script from another folder (python -P, which leaves the script's folder out)"
            )


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
