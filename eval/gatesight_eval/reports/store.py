"""A run's folder: what was asked for, and one line per finished context, so that a killed run goes on."""

import json
import subprocess
from pathlib import Path
from typing import Any

MANIFEST, RESULTS, COSTS = "run.json", "results.jsonl", "costs.jsonl"


class RunFolder:
    """Results of one run.

    `results.jsonl` holds what does not depend on the machine's speed, so that a run that was killed and went on ends
    with the same file as one that was not; `costs.jsonl` holds seconds. A context is done when it is in both.

    Args:
        path: The folder, made if need be.
        manifest: What was asked for and with what; must be equal when a run goes on.

    Raises:
        ValueError: The folder holds another run.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        record = path / MANIFEST
        if record.exists() and record.read_text(encoding="utf-8") != text:
            changes = _differences(read_manifest(path), json.loads(text))
            raise ValueError(f"{path} holds another run: {'; '.join(changes)}. Give another --out.")
        _replace(record, text)
        results, costs = (read_lines(path / name) for name in (RESULTS, COSTS))
        both = {line["item"] for line in results} & {line["item"] for line in costs}
        for name, lines in ((RESULTS, results), (COSTS, costs)):
            # A line that was cut short, or a context in one file only, is run again.
            _write_whole(path / name, [line for line in lines if line["item"] in both])
        self.done = both

    def add(self, result: dict[str, Any], cost: dict[str, Any]) -> None:
        """Append a finished context."""
        for name, line in ((RESULTS, result), (COSTS, cost)):
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.done.add(result["item"])


def read_manifest(path: Path) -> dict[str, Any]:
    """What a run was.

    Raises:
        FileNotFoundError: The folder is no run.
    """
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(f"{path} holds no {MANIFEST}: it is no folder that `gatesight evaluate --out` made.")
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line that was cut short is left out.

    Raises:
        ValueError: Another line is damaged.
    """
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    # Not splitlines: JSON leaves U+2028 and others that it breaks at as they are.
    texts = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number < len(texts):
                raise ValueError(f"{path}, line {number} is damaged: {error}.") from error
    return lines


def _write_whole(path: Path, lines: list[dict[str, Any]]) -> None:
    _replace(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _differences(held: Any, asked: Any, name: str = "") -> list[str]:
    """What differs, as `name: held, now asked`."""
    if isinstance(held, dict) and isinstance(asked, dict):
        found = []
        for key in sorted({*held, *asked}):
            found += _differences(held.get(key), asked.get(key), f"{name}.{key}" if name else key)
        return found
    return [] if held == asked else [f"{name} was {held!r}, now {asked!r}"]


def commit() -> str | None:
    """Commit of the code under measurement, with `+` if files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
