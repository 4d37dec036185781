import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.text import Corpus, bundled_prose, clean_corpus, clean_text, made_reviews
from trainer.data.text import clean as module

CASES = [
    ("<div><p>Great <b>movie</b></p><br />It&#39;s fun &amp; caf&eacute;</div>",
     "Great movie It's fun & café"),
    ("one<br>two<hr/>three", "one two three"),
    ("<i>Titanic</i>'s end: un<b>believ</b>able", "Titanic's end: unbelievable"),
    ("Don't give it 5/5, A < B and x > y!", "Don't give it 5/5, A < B and x > y!"),
    ("a < b &amp; c <br/> d", "a < b & c d"),
    ("<class 'str'>, List<String> and <https://example.org>",
     "<class 'str'>, List<String> and <https://example.org>"),
    ("<p>a <class 'str'> & List<String></p>", "a <class 'str'> & List<String>"),
    ("a <b and c> d, but <b>bold</b>", "a <b and c> d, but bold"),
    ("?a=1&copy=2&lt", "?a=1&copy=2&lt"),
    ("before<script>if (a < b) alert('&lt;p&gt;')</script><style>p { }</style>after",
     "before after"),
    ("about the <script> tag", "about the tag"),
    ("x<!-- hidden <b>words</b> -->y, but <!-- open", "x y, but <!-- open"),
    ('<a href="x" title="1 > 0">link</a>', "link"),
    ("&amp;lt;br&amp;gt;twice&amp;amp;amp;", "twice&"), ("&" + "amp;" * 40 + "lt; 3", "< 3"),
    ("我喜欢 this 🎉 — “quoted” ﬁne，全角 naïve", "我喜欢 this 🎉 — “quoted” ﬁne，全角 naïve"),
    ("cafe\u0301\u00a0\n\t x\u0000\ufeff\ud800", "café x"),
    ("<title>A</title>B<table>C<tr><td>D</table>", "A B C D"),
    ("", ""), ("<p>&nbsp;</p>", ""), ("<!DOCTYPE html><html><body>x</body></html>", "x"),
]  # fmt: skip


@pytest.fixture(params=["selectolax", "standard"])
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "standard":
        monkeypatch.setattr(module, "_selectolax", lambda: False)
    else:
        pytest.importorskip("selectolax")
    return


@pytest.mark.usefixtures("_parser")
@pytest.mark.parametrize(("dirty", "clean"), CASES)
def test_cleans_and_keeps(dirty: str, clean: str) -> None:
    assert clean_text(dirty) == clean
    assert clean_text(clean) == clean


def test_mojibake_is_repaired() -> None:
    pytest.importorskip("ftfy")
    assert clean_text("cafÃ© â€” naÃ¯ve") == "café — naïve"
    assert clean_text("Ã\xa0 la carte\nfine — line") == "à la carte fine — line"


_BITS = [
    *("<", ">", "/", "&", ";", "=", '"', "'", " ", "\n", "\xa0", "\x00", "\ud800", "Ã", "©", "é"),
    *("a", "b", "p", "br", "td", "div", "title", "script", "style", "!--", "--", "x"),
    *("lt", "gt", "amp", "#38", "nbsp"),
]


@given(st.text(max_size=60) | st.lists(st.sampled_from(_BITS), max_size=25).map("".join))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean_text(text)
    assert clean_text(once) == once


def test_hostile_text_takes_linear_time() -> None:
    def seconds(text: str) -> float:
        start = time.process_time()
        clean_text(text)
        return time.process_time() - start

    for hostile in ("<!--", "&amp;", "<a ", "<div>", "<b>", "<b <b", "<script>", "<p a='"):
        # Four times the text; the square of it would be sixteen times the time.
        assert seconds(hostile * 60_000) < 8 * seconds(hostile * 15_000) + 1


def test_prose_without_tags_stays_as_it_is() -> None:
    for text in bundled_prose().texts:
        assert clean_text(text) == " ".join(text.split())


@pytest.mark.usefixtures("_parser")
def test_no_dirt_is_left_in_made_reviews() -> None:
    cleaned, report = clean_corpus(made_reviews(600, 0))
    assert cleaned.labels is not None
    assert len(cleaned) == len(cleaned.labels) == report.kept == sum(n for _, n in report.histogram)
    joined = " ".join(cleaned.texts)
    for dirt in ("br ", "script", "track", "lead", "&amp;", "&lt;", "â€", "Ã"):
        assert dirt not in joined
    for kept in (
        "5/5",
        "don't",
        "2 < 3",
        "café",
        "naïve",
        "我在飞机上看了这部电影。",
        "😀",
        "& 10",
    ):
        assert kept in joined
    assert len(set(cleaned.texts)) == len(cleaned)
    assert report.with_tags > 200
    assert report.with_entities > 100
    assert report.mojibake_fixed is not None
    assert report.mojibake_fixed > 20
    assert report.empty_dropped > 5
    assert report.duplicates_dropped > 20


def test_report_counts_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["<b>x</b>", "x", "y &amp; z", "", "<br>", "X", "x ", "<i>&lt;</i>"]
    corpus = Corpus(texts, np.array([0, 0, 1, 0, 1, 1, 1, 0]), ("no", "yes", "never"), "test")
    cleaned, report = clean_corpus(corpus)
    assert list(cleaned.texts) == ["x", "y & z", "X", "<"]
    assert cleaned.labels is not None
    assert cleaned.labels.tolist() == [0, 1, 1, 0]
    assert (report.rows, report.with_tags, report.with_entities) == (8, 3, 2)
    assert (report.empty_dropped, report.duplicates_dropped, report.conflicts) == (2, 2, 1)
    assert report.histogram == (("no", 2), ("yes", 2), ("never", 0))
    sentence = report.sentence()
    assert "\n" not in sentence
    assert "8 texts (3 with tags" in sentence
    assert "4 kept, 2 empty and 2 repeated dropped, 1 of them in another class" in sentence
    assert "from never (0) to no (2)" in sentence
    monkeypatch.setattr(module, "_ftfy", lambda: None)
    unlabelled = Corpus(["cafÃ©", "cafÃ©"], None, (), "test")
    cleaned, report = clean_corpus(unlabelled)
    assert list(cleaned.texts) == ["cafÃ©"]
    assert cleaned.labels is None
    assert report.mojibake_fixed is None
    assert "pip install ftfy" in report.sentence()
    assert report.conflicts == 0
