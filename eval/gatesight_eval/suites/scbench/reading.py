"""Rows of a task, from the Hub or from local files, through `datasets`."""

from pathlib import Path
from typing import Any

import datasets

#: Builders of `datasets` by the suffix of a file.
_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def read_rows(
    source: str | Path, name: str, *, revision: str | None, cache_dir: str | Path | None, by_file: bool = False
) -> datasets.Dataset:
    """The rows of one configuration.

    Args:
        source: Repository on the Hub, its local copy, a folder of `<name>.parquet` or `<name>.jsonl`, or such a file.
        name: The configuration.
        revision: Commit of a repository on the Hub.
        cache_dir: Where `datasets` keeps its tables.
        by_file: A repository without configurations, with a parquet file of each name.

    Raises:
        ValueError: No such configuration, or several splits of which none is `test`.
        FileNotFoundError: The source looks like a path and is not there, or a folder has no such file.
    """
    path = Path(source)
    cache = str(cache_dir) if cache_dir is not None else None
    names = (name, name.replace("scbench_", "multi_turn_", 1))  # the second is that of early revisions
    if path.is_dir():
        candidates = [folder / f"{n}{s}" for folder in (path, path / "data") for n in names for s in _BUILDERS]
        path = next((file for file in candidates if file.is_file()), path)
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise ValueError(f"{path} is none of {', '.join(_BUILDERS)}.")
        return datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train", cache_dir=cache)
    if not path.is_dir() and (path.is_absolute() or len(path.parts) != 2 or path.suffix in _BUILDERS):
        raise FileNotFoundError(f"{source} is no file or folder here, nor of the form owner/name as on the Hub.")
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache}
    if by_file:
        if path.is_dir():
            raise FileNotFoundError(f"{source} has no {name}.parquet or {name}.jsonl.")
        return datasets.load_dataset(str(source), data_files=f"{name}.parquet", split="train", **options)
    configurations = datasets.get_dataset_config_names(str(source), revision=revision)
    found = next((n for n in names if n in configurations), None)
    if found is None:
        raise ValueError(f"{source} has no configuration {name!r}; it has {', '.join(configurations)}.")
    splits = datasets.load_dataset(str(source), found, **options)
    if "test" not in splits and len(splits) > 1:
        raise ValueError(f"{source} has the splits {', '.join(splits)} of {found}, none of which is test.")
    return splits["test"] if "test" in splits else next(iter(splits.values()))


def check_limits(max_turns: int, limit: int | None) -> None:
    """Raise ValueError if these select nothing."""
    if max_turns < 1 and max_turns != -1:
        raise ValueError(f"max_turns is a number of questions >= 1, or -1 for all; got {max_turns}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is a number of rows >= 1, or None for all; got {limit}.")
