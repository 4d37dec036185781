import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.data.text import Corpus, load_corpus
from trainer.data.text.files import require_datasets
from trainer.errors import DataError, MissingPackageError


def load(path: Path, **changes: Any) -> Corpus:
    arguments: dict[str, Any] = {
        "format": "auto", "column": "text", "label_column": "label", "want_labels": True,
    }  # fmt: skip
    return load_corpus(path, **{**arguments, **changes})


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "labels", "classes"),
    [
        ("a.jsonl", '{"text":"x","label":3}\n{"text":"y, z","label":1}\n', [1, 0], ("1", "3")),
        ("a.json", '[{"text":"x","label":"p"},{"text":"y, z","label":"n"}]', [1, 0], ("n", "p")),
        ("a.csv", '\ufefftext,label\r\nx,p\r\n"y, z", n\r\n', [1, 0], ("n", "p")),
        ("b.csv", 'text,label\nx,true\n"y, z",false\n', [1, 0], ("false", "true")),
    ],
)
def test_reads_texts_and_classes(
    tmp_path: Path, name: str, content: str, labels: list[int], classes: tuple[str, ...]
) -> None:
    corpus = load(write(tmp_path / name, content))
    assert list(corpus.texts) == ["x", "y, z"]
    assert corpus.labels is not None
    assert corpus.labels.tolist() == labels
    assert corpus.classes == classes
    assert name in corpus.source


def test_words_that_csv_readers_take_for_gaps_are_words(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "text,label\nNA,0\nnull,1\n,1\n")
    assert list(load(file).texts) == ["NA", "null", ""]


def test_reads_a_folder_of_parquet_with_named_classes(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"body": datasets.Value("string"), "kind": datasets.ClassLabel(names=["ham", "spam"])}
    )
    for name, kinds in (("2", [1, 0]), ("1", [1, 1])):
        rows = {"body": [f"{name}a", f"{name}b"], "kind": kinds}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    write(tmp_path / ".hidden.parquet", "")
    corpus = load(tmp_path, column="body", label_column="kind")
    assert list(corpus.texts) == ["1a", "1b", "2a", "2b"]
    assert corpus.labels is not None
    assert corpus.labels.tolist() == [1, 1, 1, 0]
    assert corpus.classes == ("ham", "spam")


def test_plain_text_is_paragraphs_and_needs_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    file = write(tmp_path / "a.txt", "\n\none\ntwo\n \n\nthree ü\n")
    corpus = load(file, want_labels=False)
    assert list(corpus.texts) == ["one\ntwo", "three ü"]
    assert corpus.labels is None
    with pytest.raises(DataError, match="no classes"):
        load(file)
    with pytest.raises(MissingPackageError, match=r"gpuwatch-trainer\[text\]"):
        load(write(tmp_path / "a.csv", "text,label\nx,1\n"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text":"x","label":1}\n{"text": oops\n', "a.jsonl as json: line 2"),
        ("a.jsonl", '{"text":"x","label":1}\n{"text":"y","label":"p"}\n', r"row 2 .* is a word"),
        ("a.jsonl", '{"text":"x","label":1}\n{"text":"y"}\n', "row 2 .*the class is missing"),
        ("a.jsonl", '{"text":"x","label":0}\n{"text":"y","label":-1}\n', "row 2 .*-1 is out of"),
        ("a.jsonl", '{"text":"x","label":[1]}\n', "row 1 .*not list"),
        ("a.jsonl", '{"text":1,"label":1}\n', "'text' of .* holds int64, not text"),
        ("a.jsonl", '{"text":["x"],"label":1}\n', "'text' of .* not text"),
        ("a.jsonl", '{"body":"x","label":1}\n', "no column 'text' but 'body', 'label'"),
        ("a.jsonl", '{"text":"x"}\n', "no column 'label' but 'text'.*text.label_column"),
        ("a.jsonl", b'{"text":"x"}\n{"text":"caf\xe9"}\n', "not UTF-8: line 2"),
        ("a.jsonl", "\n\n", "holds no rows"),
        ("a.csv", "text,label\nx,1\ny,\n", "row 2 .*the class is missing"),
        ("a.csv", "text,label\nx,1\ny,p\n", "row 2 .*'p' is a word, the first one '1' a number"),
        ("a.csv", "text,label\nx,0.5\ny,1\n", "row 1 .*0.5 is a measure"),
        ("a.csv", "text,label\na,1\nb,2,3,4\n", "line 3"),
        ("a.csv", "text,label\n", "holds no rows"),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", b"text,label\ncaf\xe9,1\n", "not UTF-8: line 2"),
        ("a.parquet", b"PAR1 and nothing", "cannot read .*a.parquet as parquet"),
        ("a.txt", b"one\n\ncaf\xe9", "not UTF-8: byte 8"),
        ("a.data", "x", "text.format"),
    ],
)  # fmt: skip
def test_bad_files_are_one_sentence(
    tmp_path: Path,
    name: str,
    content: str | bytes,
    sentence: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(DataError, match=sentence) as caught:
        load(file, want_labels=not name.endswith("txt"))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_bad_file_among_many_is_named(tmp_path: Path) -> None:
    good = '{"text":"x","label":1}\n{"text":"y","label":0}\n'
    for folder, bad in (("broken", "{oops\n"), ("unlabelled", '{"text":"x"}\n')):
        write(tmp_path / folder / "a.jsonl", good)
        write(tmp_path / folder / "deep/b.jsonl", good + bad)
        with pytest.raises(DataError, match=r"b\.jsonl") as caught:
            load(tmp_path / folder)
        assert " 3" in str(caught.value)
    write(tmp_path / "types/a.jsonl", good)
    write(tmp_path / "types/b.jsonl", good.replace("1", '"p"').replace("0", '"n"'))
    with pytest.raises(DataError, match="do not have the same columns and types"):
        load(tmp_path / "types")


def test_folders_are_unambiguous(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        load(tmp_path / "none")
    with pytest.raises(DataError, match="holds no json, csv, text or parquet files"):
        load(tmp_path)
    write(tmp_path / "a.txt", "hello")
    write(tmp_path / "a.csv", "text,label\nx,1\n")
    with pytest.raises(DataError, match=r"csv and text files: choose with text\.format"):
        load(tmp_path)
    assert list(load(tmp_path, format="csv").texts) == ["x"]
    assert list(load(tmp_path / "a.csv", format="text", want_labels=False).texts) == [
        "text,label\nx,1"
    ]


def test_too_many_classes_are_no_classes(tmp_path: Path) -> None:
    rows = "".join(f"x,{i}\n" for i in range(1001))
    with pytest.raises(DataError, match="1,001 different values"):
        load(write(tmp_path / "a.csv", "text,label\n" + rows))


def test_silent_and_offline_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    datasets = require_datasets()
    # What it logs as an error it raises too.
    assert not datasets.utils.logging.get_logger("datasets.builder").isEnabledFor(logging.ERROR)
    assert datasets.utils.are_progress_bars_disabled()
    assert os.environ.pop("HF_HUB_OFFLINE") == "1"
    assert os.environ["HF_DATASETS_OFFLINE"] == "0"
