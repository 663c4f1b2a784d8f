"""Everything of a script's state that is no array: a tree of plain values, written as JSON, read as data and nothing else.

Every node that JSON has no word for is an object with one key that says what it is, so nothing is guessed on the way back:

    {"map": {key: node}}            a dict with text keys        {"pairs": [[key, node], ...]}   one with other keys as well
    {"list": [...]}                 a list                       {"tuple": [...]}                a tuple, a torch.Size
    {"array": name, "type": ...}    values in the array `name`   {"empty": shape, "type": ...}   an array of no elements
    {"float": "nan"}, {"int": ".."} what JSON cannot hold        {"bytes": base64}, {"dtype": name}, {"counter": [[key, n]]}
    {"rank": rule, "values": [...]} one node for each rank

An array's `type` is [kind, dtype]: `tensor` or `numpy`, and the type of the elements as torch names it. What is none of these
is refused by its path: a pickle would hold it, and could hold anything else.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Node = Any
MAX_INT = 2**63
MAX_RECORD = 16 << 20


class StateError(TypeError):
    """A part of the state that cannot be saved or loaded as it is; the message names it and says what to do."""


def plain(value: Any, path: str) -> Node:
    """The node of a value without parts. Raises StateError, naming `path`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text_of(value, path)
    if isinstance(value, int):
        return int(value) if -MAX_INT <= value < MAX_INT else {"int": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    raise StateError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which is not saved: allowed are tensors, NumPy "
        "arrays, numbers, text, bytes, None, dicts, lists and tuples of these, modules, optimizers, and objects with "
        "state_dict() and load_state_dict()"
    )


def text_of(value: str, path: str) -> str:
    """The same text. Raises StateError if UTF-8 has no word for it: half of a surrogate pair, as in undecodable file names."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise StateError(f"{path}: the text {value!r:.60} is not Unicode ({error.reason}): save it as bytes") from None
    return value


def encoded(record: Node) -> bytes:
    """A state's record as JSON. Raises StateError if it is too large: readers take it in with every manifest."""
    text = msgspec.json.encode(record)
    if len(text) > MAX_RECORD:
        raise StateError(
            f"what is no tensor in the state takes {len(text) >> 20} MiB as text, at most {MAX_RECORD >> 20} MiB are saved: "
            "put long lists of numbers, and long bytes, into tensors or NumPy arrays"
        )
    return text


def of_mapping(value: Mapping[Any, Any], path: str, encode: Callable[[Any, str], Node]) -> Node:
    """The node of a dict; `encode` makes those of its values."""
    if isinstance(value, Counter):
        return {"counter": [[plain(key, path), int(count)] for key, count in value.items()]}
    if all(isinstance(key, str) for key in value):
        return {"map": {text_of(key, path): encode(each, f"{path}.{key}" if path else key) for key, each in value.items()}}
    return {"pairs": [[of_key(key, path), encode(each, f"{path}[{key!r}]")] for key, each in value.items()]}


def of_key(key: Any, path: str) -> Node:
    """The node of a dict's key: plain, or a tuple of plain ones."""
    return {"tuple": [plain(each, path) for each in key]} if isinstance(key, tuple) else plain(key, path)


def of_sequence(value: Sequence[Any], path: str, encode: Callable[[Any, str], Node]) -> Node:
    """The node of a list or tuple."""
    kind = "list" if isinstance(value, list) else "tuple"
    return {kind: [encode(each, f"{path}[{index}]") for index, each in enumerate(value)]}


def kind_of(node: Node) -> str:
    """What a node is: "plain" for what JSON holds itself."""
    return next(iter(node)) if isinstance(node, dict) else "plain"


def items_of(node: Node) -> dict[Any, Node]:
    """The parts of a dict's node, by key. Raises StateError if it is none."""
    match kind_of(node):
        case "map":
            return dict(node["map"])
        case "pairs":
            return {value_of(key): each for key, each in node["pairs"]}
    raise StateError(f"a {kind_of(node)} was saved where a dict is wanted")


def value_of(node: Node, array: Callable[[Node], Any] | None = None) -> Any:
    """What a node stands for; `array` gives the values of arrays. Raises StateError for what it does not know."""
    match kind_of(node):
        case "plain":
            return node
        case "map" | "pairs":
            return {key: value_of(each, array) for key, each in items_of(node).items()}
        case "list":
            return [value_of(each, array) for each in node["list"]]
        case "tuple":
            return tuple(value_of(each, array) for each in node["tuple"])
        case "float":
            return float(node["float"])
        case "int":
            return int(node["int"])
        case "bytes":
            return base64.b64decode(node["bytes"], validate=True)
        case "counter":
            return Counter({value_of(key): count for key, count in node["counter"]})
        case "array" | "empty" | "dtype" if array is not None:
            return array(node)
    raise StateError(f"the checkpoint holds a {kind_of(node)[:40]!r}, which this version does not know")


def merged(nodes: Sequence[Node], path: str = "") -> Node:
    """What all ranks say, as one node: dicts are united (pipeline stages hold different parts), everything else must be the
    same on all ranks that have it. Raises StateError naming what differs.
    """
    first = nodes[0]
    kinds = {kind_of(node) for node in nodes}
    if kinds == {"rank"}:
        return {"rank": first["rank"], "values": [value for node in nodes for value in node["values"]]}
    if kinds <= {"map", "pairs"}:
        return _merged_dicts(nodes, path)
    if kinds == {"list"} and len({len(node["list"]) for node in nodes}) == 1:
        parts = zip(*(node["list"] for node in nodes), strict=True)
        return {"list": [merged(each, f"{path}[{index}]") for index, each in enumerate(parts)]}
    other = next((rank for rank, node in enumerate(nodes) if node != first), None)
    if other is not None:
        raise StateError(
            f"{path} differs between ranks ({_short(first)} and {_short(nodes[other])}): if each rank is to keep its own, wrap "
            "it in ftrain.per_rank(...); if not, take one rank's"
        )
    return first


def _merged_dicts(nodes: Sequence[Node], path: str) -> Node:
    held: dict[Any, list[Node]] = {}
    for node in nodes:
        for key, each in items_of(node).items():
            held.setdefault(key, []).append(each)
    found = {key: merged(each, f"{path}.{key}" if path else str(key)) for key, each in held.items()}
    if all(isinstance(key, str) for key in found):
        return {"map": found}
    return {"pairs": [[of_key(key, path), each] for key, each in found.items()]}


def _short(node: Node) -> str:
    text = repr(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
