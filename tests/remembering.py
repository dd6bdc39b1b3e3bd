"""What many tests make anew and is the same each time, made once in a process."""

from __future__ import annotations

import pickle
from typing import Any

import yaml


def remember_yaml() -> None:
    """Parse a text once for each kind of loader: Hydra reads its twenty files several times for each command line. Who
    asks gets objects of his own; what cannot be read raises each time."""
    parse, known = yaml.load, {}

    def load(stream: Any, Loader: Any) -> Any:  # noqa: N803  # as PyYAML calls it
        if not hasattr(stream, "seek"):
            return parse(stream, Loader)
        start = stream.tell()
        key = Loader.__qualname__, stream.read()
        if key not in known:
            stream.seek(start)  # what is wrong is said with the name of the file
            value = parse(stream, Loader)
            try:
                known[key] = pickle.dumps(value)
            except Exception:  # of a kind of its own
                return value
        return pickle.loads(known[key])

    yaml.load = load
