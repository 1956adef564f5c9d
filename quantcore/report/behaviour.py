"""How the answers of a result differ from those of its original, as frozen values. No torch."""

from __future__ import annotations

from pydantic import Field

from quantcore.report.quality import Interval, Number, Record


class FaultChange(Record):
    """How often answers have a fault, of both models, paired by prompt.

    ``original`` and ``result`` are shares of the answers to ``num_prompts``. ``num_worse`` of these prompts have more
    faulty answers than the original's, ``num_better`` fewer; ``change`` is the difference of both as a share of the
    prompts. ``chance`` is the probability of so many worse ones among those that differ, if both models were alike.
    ``is_worse``: it is too small for chance, all tests considered. Otherwise ``num_needed`` prompts would show such a
    difference (None: the result is not worse).
    """

    fault: str
    title: str
    num_prompts: int
    original: Number
    result: Number
    num_worse: int
    num_better: int
    change: Interval
    chance: Number
    is_worse: bool
    num_needed: int | None

    def __str__(self) -> str:
        """Return the shares and what is known, such as ``20 % of the answers do not end (original: 10 %)``."""
        return f"{self.result:.0%} of the answers {self.title} (original: {self.original:.0%}); {self.outcome}"

    @property
    def outcome(self) -> str:
        """Whether the result is worse, and the number of prompts that would tell."""
        where = f"worse on {self.num_worse} of {self.num_prompts} prompts, better on {self.num_better}"
        if self.is_worse or not self.num_worse + self.num_better:
            return where if self.is_worse else "no difference"
        needed = "" if self.num_needed is None else f", about {self.num_needed} prompts would tell"
        return f"{where}: no finding{needed}"


class LengthChange(Record):
    """Number of tokens of the answers, result / original, with the 95 % interval of the ratio.

    ``is_off``: the ratio is beyond doubt above 1.25 or below 0.8. Otherwise ``num_needed`` prompts would tell, if the
    ratio is outside of these limits as measured.
    """

    ratio: Interval
    is_off: bool
    num_needed: int | None

    def __str__(self) -> str:
        ratio = f"{self.ratio.value:.2f} times the original's ({self.ratio.low:.2f} to {self.ratio.high:.2f})"
        needed = "" if self.num_needed is None else f": no finding, about {self.num_needed} prompts would tell"
        return ratio + needed


class Behaviour(Record):
    """How a result answers prompts, beside its original: each in its own template, up to its own stop tokens.

    Each of ``num_prompts`` has ``num_answers`` of both models, of at most ``max_tokens`` tokens: a greedy one,
    and those that a model's own settings sample. ``lost_ends`` are tokens that ended answers of the original and end
    none of the result. ``num_rendered_otherwise`` prompts have other tokens than the original's. ``changed_finals`` is
    the share of greedy answers to maths with another final number. ``left_out`` and
    ``prompts_sha256`` as in AnswerQuality.
    """

    num_prompts: int
    num_answers: tuple[int, int]
    max_tokens: int
    length: LengthChange | None
    faults: tuple[FaultChange, ...]
    changed_finals: Interval | None
    lost_ends: tuple[str, ...]
    num_rendered_otherwise: int
    left_out: dict[str, str] = Field(default_factory=dict)
    prompts_sha256: str | None = None

    @property
    def findings(self) -> tuple[str, ...]:
        """Phrases that say what is worse beyond chance: first in the files, then in the answers."""
        found = []
        if self.lost_ends:
            found.append(f"{', '.join(self.lost_ends)} no longer ends an answer")
        if self.num_rendered_otherwise:
            where = f"{self.num_rendered_otherwise} of {self.num_prompts} prompts"
            found.append(f"its chat template or tokenizer gives {where} other tokens")
        found += [str(each) for each in self.faults if each.is_worse]
        if self.length is not None and self.length.is_off:
            found.append(f"the length of its answers is {self.length}")
        return tuple(found)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The name of each measure, the values of the original and the result, and what follows, as a table."""
        rows = [
            (f"answers that {each.title}", f"{each.original:.0%}", f"{each.result:.0%}", each.outcome)
            for each in self.faults
        ]
        if self.length is not None:
            ratio, rest = str(self.length).split(" ", 1)
            rows.append(("length of the answers", "1", ratio, rest))
        if self.changed_finals is not None:
            changed = self.changed_finals
            interval = f"between {changed.low:.0%} and {changed.high:.0%}"
            rows.append(("changed final numbers", "", f"{changed.value:.0%}", interval))
        return rows

    def __str__(self) -> str:
        """Return the findings in a sentence, with what was left out."""
        left_out = f"; without some prompts: {', '.join(self.left_out)}" if self.left_out else ""
        found = "; ".join(self.findings) or "nothing is certainly worse"
        return f"{found}, in answers to {self.num_prompts} prompts{left_out}"
