"""The line through the trials, and its picture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.memory.curve import Fit, Point, draw, fit_line

MIB = 2**20


def points(*sizes: int, base: int = 20 * MIB, slope: int = MIB) -> list[Point]:
    return [Point(size, True, base + slope * size) for size in sizes]


@given(
    base=st.integers(-(2**30), 2**40),
    slope=st.integers(1, 2**30),
    sizes=st.sets(st.integers(1, 10_000), min_size=2, max_size=12),
    limit=st.integers(0, 2**45),
)
def test_a_line_is_found_again_and_its_edge_is_the_last_that_fits(
    base: int, slope: int, sizes: set[int], limit: int
) -> None:
    fit = fit_line([Point(size, True, base + slope * size) for size in sizes])
    assert fit is not None
    assert fit.bytes_per_sample == pytest.approx(slope)
    assert fit.residual_bytes <= 1
    edge = fit.edge(limit)
    assert edge is not None
    assert edge == 0 or fit.at(edge) <= limit + 1
    if edge < 2**40:
        assert fit.at(edge + 1) > limit - 1


def test_one_outlier_moves_the_line_little() -> None:
    odd = [*points(8, 16, 24, 32), Point(40, True, 200 * MIB)]
    fit = fit_line(odd)
    assert fit is not None
    assert fit.bytes_per_sample == pytest.approx(MIB, rel=0.1)
    assert fit.residual_bytes == pytest.approx(140 * MIB, rel=0.1)


def test_small_batches_that_hide_give_way_to_larger_ones() -> None:
    hidden = [Point(size, True, 50 * MIB) for size in (1, 2, 4)]
    fit = fit_line([*hidden, *points(32, 64, 128)])
    assert fit is not None
    assert fit.bytes_per_sample == MIB


def test_too_little_for_a_line() -> None:
    assert fit_line([]) is None
    assert fit_line(points(8)) is None
    assert fit_line([*points(8), *points(8), Point(16, False, None)]) is None


def test_a_line_that_does_not_rise_has_no_edge() -> None:
    assert Fit(5.0, 0.0, 0.0).edge(10) is None
    assert Fit(50.0, 1.0, 0.0).edge(10) == 0


def test_the_picture_in_ascii() -> None:
    trials = [*points(8, 40), Point(104, False, None)]
    lines = draw(trials, fit_line(trials), 120 * MIB, width=44, height=11, ascii_only=True)
    text = "\n".join(lines)
    assert text.isascii()
    assert all(len(line) <= 44 for line in lines)
    body = lines[1:12]
    assert lines[0] == "  MiB  peak memory"
    # The first column of the picture is batch 0, the last the largest tried.
    assert body[0].startswith("120.0 |---")
    assert body[0].endswith("x")
    assert body[-1].startswith("  0.0 |")
    assert {line.index("|") for line in body} == {6}
    assert sum(line.count("o") for line in body) == 2
    assert "predicted edge 100" in text
    assert lines[13].split() == ["batch", "26", "52", "78", "104"]
    assert "x out of memory" in text


def test_each_trial_is_where_the_axes_say() -> None:
    trials = points(25, 50, 100, base=0)
    lines = draw(trials, None, None, width=8 + 101, height=11)
    rows = lines[1:12]
    for size, row in ((25, 8), (50, 5), (100, 0)):  # peaks of 25, 50 and 100 MiB
        text = rows[row]
        assert text.index("●") - text.index("│") - 1 == round(size / 100 * (109 - 6 - 2))
    assert rows[0].startswith("100.0 │")
    assert rows[5].startswith(" 50.0 │")
    # Ticks are whole numbers, whatever the batch sizes.
    assert draw(points(33), None, None)[-2].split() == ["batch", "9", "18", "27", "36"]


@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=12, unique=True),
    slope=st.integers(0, 2**30),
    fails=st.integers(0, 11),
    limit=st.one_of(st.none(), st.integers(0, 2**48)),
    width=st.integers(40, 120),
    height=st.integers(5, 30),
    ascii_only=st.booleans(),
)
def test_every_picture_keeps_to_its_width(
    sizes: list[int],
    slope: int,
    fails: int,
    limit: int | None,
    width: int,
    height: int,
    ascii_only: bool,
) -> None:
    trials = [
        Point(size, index < fails, 2**20 + slope * size if index < fails else None)
        for index, size in enumerate(sorted(sizes))
    ]
    lines = draw(trials, fit_line(trials), limit, width=width, height=height, ascii_only=ascii_only)
    assert all(len(line) <= width for line in lines)
    axis = "|" if ascii_only else "│"
    assert sum(axis in line for line in lines[: height + 1]) == height
    assert draw([], None, None) == []
