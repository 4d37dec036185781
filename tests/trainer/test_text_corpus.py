from pydoc_data.topics import topics

import numpy as np
import pytest

from trainer.data.text import Corpus, bundled_prose, made_reviews
from trainer.errors import DataError


def test_bundled_prose_is_prose_with_topics() -> None:
    prose = bundled_prose()
    assert len(prose) > 1500
    paragraphs = {text.strip() for topic in topics.values() for text in topic.split("\n\n")}
    assert sorted(prose.texts) == sorted(paragraphs - {""})
    assert len(prose.classes) == 9
    assert prose.classes[-1] == "other"
    assert prose.labels is not None
    counts = np.bincount(prose.labels)
    assert len(counts) == 9
    assert counts.min() > 20
    assert all(text == text.strip() and text for text in prose.texts)


def test_a_python_without_its_help_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="name a file of texts"):
        bundled_prose()


def test_made_reviews_are_seeded_dirty_and_learnable() -> None:
    reviews = made_reviews(500, 3)
    again, other = made_reviews(500, 3), made_reviews(500, 4)
    assert list(reviews.texts) == list(again.texts)
    assert list(reviews.texts) != list(other.texts)
    assert reviews.labels is not None
    assert len(reviews) == len(reviews.labels) == 500
    joined = "".join(reviews.texts)
    for dirt in ("<br />", "<script>", "&amp;", "â€”", "&nbsp;"):
        assert dirt in joined
    assert len(set(reviews.texts)) < 500
    good = np.array(["superb" in text for text in reviews.texts])
    bad = np.array(["waste" in text for text in reviews.texts])
    assert good.any()
    assert set(reviews.labels[good].tolist()) == {1}
    assert set(reviews.labels[bad].tolist()) == {0}


def test_split_depends_on_the_text_alone() -> None:
    texts = [f"text {i}" for i in range(400)] + ["text 0", "half a pair \ud800"]
    corpus = Corpus(texts, np.arange(402) % 2, ("a", "b"), "test")
    train, held_out = corpus.split(0.25)
    assert len(train) + len(held_out) == 402
    assert 60 < len(held_out) < 140
    assert not set(train.texts) & set(held_out.texts)
    assert train.labels is not None
    assert all(
        label == texts.index(text) % 2
        for text, label in zip(train.texts, train.labels, strict=True)
        if text != "text 0"
    )
    # More texts, the other way round: nobody changes sides.
    more = Corpus(["new", *reversed(texts)], None, (), "test")
    assert set(more.split(0.25)[1].texts) - {"new"} == set(held_out.texts)
    assert len(corpus.split(0.0)[1]) == 0
