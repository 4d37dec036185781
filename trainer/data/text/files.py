"""Texts from the user's files: json, jsonl, csv, plain text, parquet."""

import codecs
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.data.synthetic import cache_folder
from trainer.data.text.texts import Corpus, Labels
from trainer.errors import DataError, MissingPackageError

__all__ = ["Format", "load_corpus", "require_datasets"]

Format = Literal["auto", "json", "csv", "text", "parquet"]

_SUFFIXES: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
# More different values than that in a label column are numbers or names, not classes.
_CLASSES_MAX = 1000


def require_datasets() -> Any:
    """The module `datasets`: offline unless the environment says otherwise, and silent.

    Raises `MissingPackageError` with the line to type if it is not installed.
    """
    # Read when it is imported. Only local files are read here, and a machine without a network
    # would otherwise wait for one.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import datasets
    except ImportError:
        raise MissingPackageError(
            "json, csv and parquet files and the wordpiece tokenizer need Hugging Face datasets: "
            'pip install "gpuwatch-trainer[text]"'
        ) from None
    datasets.disable_progress_bars()
    # It logs each error before it raises it; one sentence is enough.
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    return datasets


def load_corpus(
    path: Path, *, format: Format, column: str, label_column: str, want_labels: bool
) -> Corpus:
    """The texts of a file, or of all files of that format below a folder, in the order of names.

    json (one object a line, or one array), csv and parquet have a text in `column` and, where
    `want_labels`, a class in `label_column`: text, a number or true/false. The classes are the
    values found, in order. A plain text file has one text per paragraph and no classes. A missing
    text is an empty one.

    Raises `DataError`, with the file's name and where known the row, for files that are missing,
    empty, broken or in another encoding than UTF-8, a column that is missing or of another kind,
    and a class that is missing, out of range or of another kind than the rest.
    """
    path = path.expanduser()
    kind, files = _find(path, format)
    for file in files:
        _readable(file, text=kind in ("json", "csv"))
    if kind == "text":
        if want_labels:
            raise DataError(
                f"{path} is plain text, which has no classes: a json, csv or parquet file can have "
                f"them in the column {label_column!r}"
            )
        texts = [text for file in files for text in _paragraphs(file)]
        return Corpus(_some(texts, path), None, (), str(path))
    rows = _load(kind, files, path)
    names = list(rows.column_names)
    for wanted, key in ((column, "text.column"), (label_column, "text.label_column")):
        if wanted not in names and (wanted == column or want_labels):
            raise DataError(
                f"{path} has no column {wanted!r} but {', '.join(map(repr, names[:20]))}: choose "
                f"with {key}"
            )
    kind_of_text = str(getattr(rows.features[column], "dtype", "nested values"))
    if kind_of_text not in ("string", "large_string", "null"):
        raise DataError(f"the column {column!r} of {path} holds {kind_of_text}, not text")
    texts = _some([_whole(text or "") for text in rows[column]], path)
    if not want_labels:
        return Corpus(texts, None, (), str(path))
    feature = rows.features[label_column]
    names = list(getattr(feature, "names", []))
    values = list(rows[label_column])
    try:
        labels, classes = _classes(values, names)
    except _LabelError as bad:
        where = f"the column {label_column!r} of {path}"
        if bad.row is not None:
            file, row = _locate(kind, files, bad.row)
            where = f"row {row + 1} of {file}, column {label_column!r}"
        raise DataError(f"{where}: {bad.reason}") from None
    return Corpus(texts, labels, classes, str(path))


def _find(path: Path, wanted: Format) -> tuple[Format, list[Path]]:
    """The format, and the files that have it."""
    if path.is_file():
        kind = _SUFFIXES.get(path.suffix.lower()) if wanted == "auto" else wanted
        if kind is None:
            raise DataError(
                f"{path} does not tell its format by its name: set text.format to json, csv, text "
                "or parquet"
            )
        return kind, [path]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path} to read texts from")
    found: dict[Format, list[Path]] = {}
    for parent, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            kind = _SUFFIXES.get(os.path.splitext(name)[1].lower())
            if kind is not None and not name.startswith("."):
                found.setdefault(kind, []).append(Path(parent, name))
    if wanted != "auto":
        found = {kind: files for kind, files in found.items() if kind == wanted}
    if not found:
        kinds = "json, csv, text or parquet" if wanted == "auto" else wanted
        raise DataError(f"{path} holds no {kinds} files")
    if len(found) > 1:
        raise DataError(
            f"{path} holds {' and '.join(sorted(found))} files: choose with text.format"
        )
    ((kind, files),) = found.items()
    return kind, sorted(files)


def _readable(file: Path, *, text: bool) -> None:
    """Raise for an empty file, and for text that is not UTF-8, which readers find late or never."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = lines = 0
    try:
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                size += len(block)
                if not text:
                    return
                decoder.decode(block)
                lines += block.count(b"\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # `object` is this block, after what the last one had left over.
        lines += error.object[: error.start].count(b"\n")
        raise DataError(f"{file} is not UTF-8: line {lines + 1:,} cannot be decoded") from None
    except OSError as error:
        raise DataError(f"cannot read the text file {file}: {error.strerror}") from None
    if size == 0:
        raise DataError(f"{file} is empty")


def _paragraphs(file: Path) -> list[str]:
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: byte {error.start:,} cannot be decoded") from None
    except OSError as error:
        raise DataError(f"cannot read the text file {file}: {error.strerror}") from None
    paragraphs: list[list[str]] = [[]]
    for line in content.splitlines():
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(lines).strip() for lines in paragraphs if lines]


def _load(kind: Format, files: Sequence[Path], path: Path) -> Any:
    """All rows, as a `datasets.Dataset`."""
    datasets = require_datasets()
    if kind == "csv":
        # By default the words NA, null and None would be missing values.
        options: dict[str, Any] = {"keep_default_na": False}
    else:
        options = {}
    try:
        cache = cache_folder() / "datasets"
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot keep the read texts in {cache_folder()}: {error.strerror}; name another cache "
            "with XDG_CACHE_HOME"
        ) from None

    def load(some: Sequence[Path]) -> Any:
        return datasets.load_dataset(
            kind, data_files=[str(file) for file in some], split="train",
            cache_dir=str(cache), **options,
        )  # fmt: skip

    try:
        return load(files)
    # pyarrow, pandas and datasets raise nearly anything on damaged files.
    except Exception as error:
        failed, reason = path, error
        # Which of many it was is only known by reading each alone.
        for file in files if len(files) > 1 else ():
            try:
                load([file])
            except Exception as alone:
                failed, reason = file, alone
                break
        else:
            if len(files) > 1:
                raise DataError(
                    f"the files of {path} do not have the same columns and types: {_reason(error)}"
                ) from None
            failed = files[0]
    if "corresponds to no data" in str(reason):
        raise DataError(f"{failed} holds no rows")
    if kind == "json" and failed.is_file() and (fault := _json_fault(failed)):
        raise DataError(f"cannot read {failed} as json: {fault}")
    raise DataError(f"cannot read {failed} as {kind}: {_reason(reason)}")


def _json_fault(file: Path) -> str | None:
    """The first line that is no JSON, None if that is not what is wrong."""
    with file.open(encoding="utf-8-sig") as opened:
        first = opened.readline()
        opened.seek(0)
        array = first.lstrip().startswith("[")
        lines = [(0, opened.read())] if array else list(enumerate(opened))
    for before, line in lines:
        try:
            json.loads(line or "null")
        except json.JSONDecodeError as error:
            if line.strip():
                return f"line {before + error.lineno:,}: {error.msg}"
    return None


def _locate(kind: Format, files: Sequence[Path], row: int) -> tuple[Path, int]:
    """The file, and the row in it, of a row of all files together."""
    for file in files[:-1]:
        rows = len(_load(kind, [file], file))
        if row < rows:
            return file, row
        row -= rows
    return files[-1], row


def _reason(error: BaseException) -> str:
    """The cause in one line: what wraps it only says that loading failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:199] + "…"


class _LabelError(Exception):
    def __init__(self, reason: str, row: int | None = None) -> None:
        self.reason = reason
        self.row = row


def _classes(values: Sequence[Any], names: Sequence[str]) -> tuple[Labels, tuple[str, ...]]:
    """Labels and classes of a column's values; `names` are those of a column that has them."""
    for row, value in enumerate(values):
        if value is None or value != value or (isinstance(value, str) and not value.strip()):  # noqa: PLR0124
            raise _LabelError("the class is missing", row)
        if not isinstance(value, (str, bool, int, float)):
            raise _LabelError(f"a class is a word or a number, not {type(value).__name__}", row)
        if isinstance(value, float) and not value.is_integer():
            raise _LabelError(f"{value:g} is a measure, not a class", row)
    # In a csv file numbers beside a word or a gap are read as words.
    kinds = [_kind(value) for value in values]
    for row, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise _LabelError(
                f"the class {values[row]!r} is a {kind}, the first one {values[0]!r} a {kinds[0]}",
                row,
            )
    if kinds[0] != "word":
        return _numbered([int(value) for value in values], names, kinds[0] == "truth value")
    texts = [value.strip() for value in values]
    classes = sorted(set(texts))
    _plausible(len(classes))
    index = {name: label for label, name in enumerate(classes)}
    return np.array([index[text] for text in texts], dtype=np.int64), tuple(classes)


def _kind(value: str | float) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, str) and not _INTEGER.fullmatch(value.strip()):
        return "word"
    return "number"


def _numbered(
    numbers: list[int], names: Sequence[str], truth: bool
) -> tuple[Labels, tuple[str, ...]]:
    for row, number in enumerate(numbers):
        if number < 0:
            raise _LabelError(f"the class {number} is out of range: classes count from 0", row)
        if names and number >= len(names):
            raise _LabelError(
                f"the class {number} is out of range: the column names {len(names)}, from 0", row
            )
    if names:
        return np.array(numbers, dtype=np.int64), tuple(names)
    found = sorted(set(numbers))
    _plausible(len(found))
    labels = np.searchsorted(found, numbers).astype(np.int64)
    return labels, tuple(("false", "true")[n] if truth else str(n) for n in found)


def _plausible(classes: int) -> None:
    if classes > _CLASSES_MAX:
        raise _LabelError(
            f"{classes:,} different values, more than the {_CLASSES_MAX:,} classes that are allowed"
        )


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which no tokenizer can encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _some(texts: list[str], path: Path) -> list[str]:
    if not texts:
        raise DataError(f"{path} holds no texts")
    return texts
