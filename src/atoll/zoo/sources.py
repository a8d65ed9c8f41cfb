"""Where the bytes of a corpus come from. `read_source` gives (bytes, truncated) for a `--corpus` value."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from atoll.errors import CorpusError

CORPUS_BYTES_MAX = 512 * 1024 * 1024
"""Every learner process holds the corpus while it cuts out its shard: four of them still fit into 8 GB."""
SNIFF_BYTES = 8192
"""A file with a NUL in its first so many bytes is taken for binary, as git does."""
HF_INSTALL = "pip install datasets"
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})


def read_source(spec: str) -> tuple[bytes, bool]:
    """All bytes of the corpus called `spec`, cut at CORPUS_BYTES_MAX (then the second value is True)."""
    if spec == "stdlib":
        return _join(_read(path) for path in stdlib_files())
    if spec == "python":
        return _join(_read(path) for path in python_files())
    if spec.startswith("hf:"):
        return _join(_rows(spec))
    path = Path(spec).expanduser()
    if path.is_file():
        return _join([_read(path, CORPUS_BYTES_MAX + 1)])
    if path.is_dir():
        return _join(_text_files(path))
    raise CorpusError(
        f"no file or folder {spec!r}; give an existing path, hf:NAME for a dataset, or use stdlib or python"
    )


def stdlib_files() -> list[Path]:
    """The standard library's *.py files, with its tests where they are installed (they are two thirds of it)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in _walk(root, STDLIB_SKIPPED) if p.suffix == ".py"]
    if not files:
        raise CorpusError(f"no Python source under {root}; give --corpus a file or folder with text")
    return files


def python_files() -> list[Path]:
    """Every *.py file of this Python: the standard library's, and those of the packages that are installed beside it.
    Several times as much text, but not the same on every machine."""
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    installed = [p for root in packages for p in _walk(Path(root), frozenset({"__pycache__"})) if p.suffix == ".py"]
    return [*stdlib_files(), *(path for path in installed if path.is_file())]


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files under `root`, sorted by path the same way on every machine; no hidden ones, no symbolic folder links."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and s not in skipped)
        yield from (Path(folder, n) for n in sorted(names) if not n.startswith("."))


def _read(path: Path, limit: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _text_files(folder: Path) -> Iterator[bytes]:
    for path in _walk(folder):
        if path.is_file():  # not a broken link, a pipe or a socket
            data = _read(path, CORPUS_BYTES_MAX + 1)
            if b"\0" not in data[:SNIFF_BYTES]:
                yield data


def _join(parts: Iterable[bytes]) -> tuple[bytes, bool]:
    """Concatenate, stopping at the limit. The join is the only moment with two copies in memory."""
    kept: list[bytes] = []
    room = CORPUS_BYTES_MAX
    truncated = False
    for part in parts:
        if len(part) > room:
            kept.append(part[:room])
            truncated = True
            break
        kept.append(part)
        room -= len(part)
    return b"".join(kept), truncated


def _rows(spec: str) -> Iterator[bytes]:
    """The text column of a Hugging Face dataset, a newline after each row: hf:NAME_OR_PATH[:split[:column]]."""
    try:
        import datasets
    except ImportError:
        raise CorpusError(
            f"the corpus {spec!r} needs the Hugging Face datasets library; install it with: {HF_INSTALL}"
        ) from None
    name, split, column = [*spec.removeprefix("hf:").split(":"), "", ""][:3]
    try:
        table = _open_dataset(datasets, name, split or "train")
    except Exception as error:  # the library raises a dozen unrelated types, from ValueError to network errors
        raise CorpusError(f"cannot load the dataset {name!r}: {error}; check its name or path and the split") from error
    columns = list(table.column_names)
    column = column or ("text" if "text" in columns else columns[0])
    if column not in columns:
        raise CorpusError(f"the dataset {name!r} has no column {column!r}; its columns are {', '.join(columns)}")
    for row in table:
        if not isinstance(row[column], str):
            raise CorpusError(
                f"column {column!r} of the dataset {name!r} holds {type(row[column]).__name__}, not text; "
                f"name a text column: hf:{name}:{split or 'train'}:COLUMN"
            )
        yield row[column].encode() + b"\n"


def _open_dataset(datasets: Any, name: str, split: str) -> Any:
    """A saved dataset's folder, a data file by its ending, or whatever `load_dataset` makes of the name."""
    path = Path(name).expanduser()
    if path.is_file():
        kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}.get(path.suffix, "text")
        return datasets.load_dataset(kind, data_files=str(path), split="train")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path))
        return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    return datasets.load_dataset(str(path) if path.is_dir() else name, split=split)
