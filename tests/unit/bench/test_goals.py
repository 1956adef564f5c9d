"""The best results of an exhaustive search, and the table that sets goals beside them."""

from bench.goals import Row, best_of_each_size, table


def row(asked, num_bytes, kl, cpu_s=100.0):
    return Row(asked, num_bytes, kl, 0.01, cpu_s, "none")


def test_each_size_has_the_best_result_that_is_no_larger():
    rows = [row("d", 40, 0.1), row("a", 10, 0.5), row("c", 30, 0.6), row("b2", 20, 0.4), row("b1", 20, 0.3)]
    assert [(size, each.asked) for size, each in best_of_each_size(rows)] == [
        (10, "a"), (20, "b1"), (30, "b1"), (40, "d"),
    ]  # fmt: skip


def test_a_goal_stands_beside_the_best_of_its_size():
    rows = [row("a", 10_000_000, 0.5), row("b", 20_000_000, 0.2, 300.0)]
    text = table(rows, [row("20000000", 19_000_000, 0.22, 40.0)])
    assert "400 s of CPU time for 2 results" in text
    assert "| 20.0 MB | b | 0.2 | 19.0 MB | 0.22 | +10 % | 10 % |" in text and "| 10.0 MB" not in text
