import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.data.text import ByteTokenizer, Corpus, bundled_prose, tokenize, train_wordpiece
from trainer.errors import DataError, MissingPackageError

TEXTS = ["Hello, world!", "ünïcode 我 🎉", "", "a much longer text than the others " * 5]


class Counted:
    """A tokenizer that is not bytes, and counts what it is asked for."""

    size, pad_id = 100, 0

    def __init__(self, name: str = "counted") -> None:
        self.name = name
        self.texts = 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        self.texts += len(texts)
        return [[1, *(3 + len(word) for word in text.split()), 2] for text in texts]


def corpus(labels: bool = True) -> Corpus:
    return Corpus(TEXTS, np.array([1, 0, 1, 0]) if labels else None, ("a", "b"), "test")


def test_bytes_are_utf8_between_ends() -> None:
    tokenizer = ByteTokenizer()
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert (ids[0], ids[-1]) == (257, 258)
        assert bytes(ids[1:-1]).decode() == text
        assert max(ids) < tokenizer.size
        assert tokenizer.pad_id not in ids
    assert tokenizer.encode(["\ud800"]) == [[257, ord("?"), 258]]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Counted()], ids=["bytes", "mapped"])
@pytest.mark.parametrize("labels", [True, False])
def test_items_are_ids_and_labels(
    tmp_path: Path, tokenizer: ByteTokenizer | Counted, labels: bool
) -> None:
    tokens = tokenize(
        corpus(labels), tokenizer, max_tokens=500, split_long=True, num_proc=1, cache=tmp_path
    )
    expected = tokenizer.encode(TEXTS)
    assert len(tokens) == 4
    assert tokens.lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.lengths.dtype == np.int32
    assert tokens.tokens == sum(map(len, expected))
    for index, ids in enumerate(expected):
        item, label = tokens[index]
        assert item.tolist() == ids
        assert label == ([1, 0, 1, 0][index] if labels else -1)
    nested = tokens.__getitems__([[3], [0, 2]])
    assert [[item.tolist() for item, _ in row] for row in nested] == [
        [expected[3]],
        [expected[0], expected[2]],
    ]
    assert (tokens.split, tokens.truncated) == (0, 0)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Counted()], ids=["bytes", "mapped"])
def test_long_texts_are_cut_into_several_and_nothing_is_lost(
    tmp_path: Path, tokenizer: ByteTokenizer | Counted
) -> None:
    whole = tokenizer.encode(TEXTS)
    for max_tokens in (2, 3, 8, 11, 36):
        tokens = tokenize(
            corpus(), tokenizer, max_tokens=max_tokens, split_long=True, num_proc=1, cache=tmp_path
        )
        assert tokens.ids.tolist() == [one for ids in whole for one in ids]
        assert tokens.lengths.max() <= max_tokens
        assert max_tokens == 2 or tokens.lengths.min() > 1
        assert tokens.split == sum(len(ids) > max_tokens for ids in whole)
        assert tokens.truncated == 0
        assert tokens.labels[-1] == 0


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Counted()], ids=["bytes", "mapped"])
def test_or_their_end_is_cut_off_and_counted(
    tmp_path: Path, tokenizer: ByteTokenizer | Counted
) -> None:
    whole = tokenizer.encode(TEXTS)
    tokens = tokenize(
        corpus(), tokenizer, max_tokens=9, split_long=False, num_proc=1, cache=tmp_path
    )
    assert len(tokens) == 4
    assert tokens.lengths.max() == 9
    assert tokens[3][0].tolist() == [*whole[3][:8], whole[3][-1]]
    assert tokens.truncated == sum(len(ids) > 9 for ids in whole) > 0
    assert tokens.split == 0


def test_an_empty_corpus_is_an_empty_set(tmp_path: Path) -> None:
    nothing = Corpus([], None, (), "test")
    tokens = tokenize(
        nothing, ByteTokenizer(), max_tokens=9, split_long=True, num_proc=1, cache=tmp_path
    )
    assert len(tokens) == tokens.tokens == 0


def test_the_second_time_comes_from_the_cache(tmp_path: Path) -> None:
    first, second = Counted(), Counted()
    arguments = {"max_tokens": 8, "split_long": True, "num_proc": 1, "cache": tmp_path}
    made = tokenize(corpus(), first, **arguments)  # type: ignore[arg-type]
    kept = tokenize(corpus(), second, **arguments)  # type: ignore[arg-type]
    assert (first.texts, second.texts) == (4, 0)
    assert kept.ids.tolist() == made.ids.tolist()
    assert kept.lengths.tolist() == made.lengths.tolist()
    # The labels are not kept: texts may have been sorted anew.
    assert tokenize(corpus(False), second, **arguments).labels.tolist()[0] == -1  # type: ignore[arg-type]
    assert second.texts == 0
    # All else that decides the ids makes them anew.
    other = Counted("another")
    tokenize(corpus(), other, **arguments)  # type: ignore[arg-type]
    tokenize(corpus(), second, **{**arguments, "max_tokens": 9})  # type: ignore[arg-type]
    tokenize(corpus(), second, **{**arguments, "split_long": False})  # type: ignore[arg-type]
    shorter = Corpus(TEXTS[:3], None, (), "test")
    tokenize(shorter, second, **arguments)  # type: ignore[arg-type]
    assert (other.texts, second.texts) == (4, 4 + 4 + 3)
    for file in (tmp_path / "tokens").glob("*.arrow"):
        file.write_bytes(b"damaged")
    with pytest.raises(DataError, match="delete the file"):
        tokenize(corpus(), second, **arguments)  # type: ignore[arg-type]


def test_wordpiece_is_trained_once_and_cut_in_the_way_of_bert(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    from trainer.data.text import tokens as module

    prose = bundled_prose()
    tokenizer = train_wordpiece(prose.texts, 1000, tmp_path)
    assert tokenizer.size == 1000
    encoded = tokenizer.encode(["The class of it", "THE CLASS OF IT", "我"])
    assert encoded[0] == encoded[1]
    assert (encoded[0][0], encoded[0][-1]) == (2, 3)
    assert max(map(max, encoded)) < 1000
    (file,) = (tmp_path / "tokenizers").glob("*.json")
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2  # and the lock, nothing unfinished
    calls: list[int] = []
    train = module._train
    module._train = lambda *arguments: calls.append(1) or train(*arguments)  # type: ignore[func-returns-value]
    try:
        again = train_wordpiece(prose.texts, 1000, tmp_path)
        assert (again.name, again.encode(["It is."])) == (
            tokenizer.name,
            tokenizer.encode(["It is."]),
        )
        assert calls == []
        assert train_wordpiece(prose.texts[:50], 300, tmp_path).name != tokenizer.name
        assert calls == [1]
    finally:
        module._train = train
    # Two processes share the work, and give what one gives, in the order of the texts.
    sets = [
        tokenize(prose, tokenizer, max_tokens=64, split_long=True, num_proc=n, cache=tmp_path)
        for n in (1, 2)
    ]
    assert sets[0].ids.tolist() == sets[1].ids.tolist()
    assert sets[0].labels.tolist() == sets[1].labels.tolist()
    assert sets[0].tokens == sum(len(ids) for ids in tokenizer.encode(list(prose.texts)))
    assert capfd.readouterr() == ("", "")
    file.write_text("{")
    with pytest.raises(DataError, match="delete the file"):
        train_wordpiece(prose.texts, 1000, tmp_path)


def _train_at_once(
    cache: Path, barrier: "multiprocessing.synchronize.Barrier", made: Path, names: Path
) -> None:
    from trainer.data.text import tokens as module

    train = module._train

    def counted(*arguments: object) -> object:
        made.open("a").write("x")
        return train(*arguments)  # type: ignore[arg-type]

    module._train = counted
    barrier.wait(20)
    name = train_wordpiece(TEXTS * 20, 300, cache).name
    names.open("a").write(f"{name}\n")


def test_two_processes_at_once_train_one(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    files = (tmp_path / "cache", barrier, tmp_path / "made", tmp_path / "names")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    processes = [context.Process(target=_train_at_once, args=files, daemon=True) for _ in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
        del os.environ["TOKENIZERS_PARALLELISM"]
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "made").read_text() == "x"
    first, second = (tmp_path / "names").read_text().split()
    assert first == second


def test_missing_packages_and_caches_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        tokenize(corpus(), Counted(), max_tokens=9, split_long=True, num_proc=1, cache=blocked)
    for package in ("tokenizers", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r"gpuwatch-trainer\[text\]"):
        train_wordpiece(TEXTS, 300, tmp_path)
    with pytest.raises(MissingPackageError, match=r"gpuwatch-trainer\[text\]"):
        tokenize(corpus(), Counted(), max_tokens=9, split_long=True, num_proc=1, cache=tmp_path)
    # Bytes need neither.
    assert (
        len(
            tokenize(
                corpus(),
                ByteTokenizer(),
                max_tokens=999,
                split_long=True,
                num_proc=2,
                cache=blocked,
            )
        )
        == 4
    )
