import math
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.classes import (
    balance_weights,
    class_counts,
    histogram_lines,
    imbalance,
    sentence,
)
from trainer.errors import DataError


def array(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, dtype=np.int64)


def test_counts() -> None:
    assert class_counts(array(0, 2, 2), 4).tolist() == [1, 0, 2, 0]
    assert class_counts(array(), 2).tolist() == [0, 0]


@pytest.mark.parametrize(("labels", "wrong"), [((0, 3), 3), ((-1, 2), -1)])
def test_a_label_out_of_range(labels: tuple[int, ...], wrong: int) -> None:
    with pytest.raises(DataError, match=f"the label {wrong}, but there are 3 classes"):
        class_counts(array(*labels), 3)
    with pytest.raises(DataError, match=f"the label {wrong}, but there are 3 classes"):
        balance_weights(array(*labels), array(1, 1, 1), 1.0)


def test_imbalance() -> None:
    assert imbalance(array(5, 5)) == 1
    assert imbalance(array(2, 5, 4)) == 2.5
    assert imbalance(array(0, 5)) == math.inf
    assert math.isnan(imbalance(array(0, 0)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=50), st.floats(0, 1))
def test_classes_are_drawn_in_proportion_to_a_power_of_their_counts(
    values: list[int], balance: float
) -> None:
    labels = array(*values)
    counts = class_counts(labels, 5)
    weights = balance_weights(labels, counts, balance)
    assert weights.mean() == pytest.approx(1)
    shares = np.bincount(labels, weights, minlength=5) / weights.sum()
    wanted = np.where(counts > 0, np.maximum(counts, 1) ** (1 - balance), 0)
    assert shares == pytest.approx(wanted / wanted.sum())


def test_the_ends_of_balance() -> None:
    labels = array(0, 0, 0, 1)
    assert balance_weights(labels, array(3, 1), 0.0).tolist() == [1, 1, 1, 1]
    assert balance_weights(labels, array(3, 1), 1.0) == pytest.approx([2 / 3] * 3 + [2])
    assert balance_weights(array(), array(0, 0), 1.0).tolist() == []


def test_a_bar_for_each_class() -> None:
    lines = histogram_lines(["cat", "horse", "none"], array(100, 1200, 0), 50)
    assert lines == [
        "horse  1,200   92.3%  " + "#" * 28,
        "cat      100    7.7%  ##",
        "none       0    0.0%",
    ]
    assert histogram_lines(["only"], array(0), 40) == ["only  0    0.0%"]
    # Rare, but there.
    assert histogram_lines(["a", "b"], array(100_000, 1), 40)[1].endswith("0.0%  #")


def test_many_classes_show_both_ends() -> None:
    names = [f"class{i:02d}" for i in range(40)]
    lines = histogram_lines(names, array(*range(1, 41)), 60)
    assert len(lines) == 13
    assert lines[6] == "... 28 more"
    assert lines[0].startswith("class39  40")
    assert lines[12].startswith("class00   1")
    assert len(histogram_lines(names[:12], array(*range(12)), 60)) == 12


@given(
    st.lists(st.tuples(st.text(max_size=40), st.integers(0, 10**7)), min_size=1, max_size=20),
    st.integers(50, 120),
)
def test_lines_fit(classes: list[tuple[str, int]], width: int) -> None:
    lines = histogram_lines([name for name, _ in classes], array(*(n for _, n in classes)), width)
    for line in lines:
        assert line.isprintable()
        cells = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in line)
        assert cells - sum(1 for c in line if unicodedata.combining(c)) <= width


def test_digits_are_aligned_under_wide_letters() -> None:
    lines = histogram_lines(["猫", "dog\x1b[31m"], array(10, 5), 60)
    assert lines[0].startswith("猫" + " " * 6 + "  10")
    assert lines[1].startswith("dog?[31m   5")
    long = histogram_lines(["x" * 30, "y"], array(1, 1), 90)
    assert long[0].startswith("x" * 23 + "…  1")
    assert long[1].startswith("y" + " " * 23 + "  1")


def test_a_sentence_only_where_it_matters() -> None:
    assert sentence(array(10, 10)) is None
    assert sentence(array(29, 10)) is None
    assert sentence(array(0, 0)) is None
    assert sentence(array(1200, 100)) == (
        "the largest class has 12 times the samples of the smallest (1,200 and 100): "
        "data.balance above 0 draws rare classes more often"
    )
    assert sentence(array(30, 10)) is not None
    assert sentence(array(4, 0, 3)) == (
        "1 of 3 classes has no training samples: they cannot be learned"
    )
