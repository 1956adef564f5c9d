"""The frontier of an exhaustive search, and the table that sets goals beside it."""

from bench.goals import Row, frontier, table


def row(asked, num_bytes, kl, cpu_s=100.0):
    return Row(asked, num_bytes, kl, 0.01, cpu_s, "none")


def test_the_frontier_has_what_no_smaller_result_beats():
    rows = [row("d", 40, 0.1), row("a", 10, 0.5), row("c", 30, 0.6), row("b2", 20, 0.4), row("b1", 20, 0.3)]
    assert [each.asked for each in frontier(rows)] == ["a", "b1", "d"]


def test_a_goal_stands_beside_the_best_of_its_size():
    rows = [row("a", 10_000_000, 0.5), row("b", 20_000_000, 0.2, 300.0)]
    text = table(rows, [row("20000000", 19_000_000, 0.22, 40.0)])
    assert "400 s of CPU time for 2 results" in text
    assert "| 20.0 MB | b | 0.2 | 19.0 MB | 0.22 | +10 % | 10 % |" in text and "| 10.0 MB" not in text
