"""What the client adds to the answers of the service, whose fields ``answers`` lists."""

from typing import Any

from pydantic import BaseModel, ConfigDict

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


class Answer(BaseModel):
    """An answer of the service: frozen, and open to fields that this client does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Mapped(Answer):
    """An answer whose fields can also be read by name, as JSON data: it used to be a plain dictionary."""

    def __getitem__(self, name: str) -> Any:
        return self.model_dump(mode="json")[name]


class SummaryBase(Mapped):
    size_before_bytes: int
    size_after_bytes: int
    perplexity_ratio: float | None = None
    verdict: Any = None

    def __str__(self) -> str:
        """Return what a person asks first: the verdict with its reason, what to do next, and the size."""
        size = f"{self.size_before_bytes / 1e6:,.1f} MB -> {self.size_after_bytes / 1e6:,.1f} MB"
        ratio = self.perplexity_ratio
        lines = [size if ratio is None else f"{size}, perplexity {100 * (ratio - 1):+.2f} %"]
        if self.verdict is not None:
            advice = [f"Next: {self.verdict.advice}"] if self.verdict.advice else []
            sentence = [self.verdict.sentence] if self.verdict.sentence else []
            lines = [*sentence, f"{self.verdict.level}: {self.verdict.reason}", *advice, *lines]
        return "\n".join(lines)


class JobBase(Answer):
    state: str

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES


class PublicationBase(Answer):
    state: str

    @property
    def is_final(self) -> bool:
        return self.state in ("published", "failed")


class WorstLayerBase(Answer):
    relative_error: float
    output_error: float | None = None

    @property
    def error(self) -> str:
        """The error by which it is the worst."""
        if self.output_error is None:
            return f"weight error {self.relative_error:.4f}"
        return f"output error {self.output_error:.4f}"


class ChatEvent(Answer):
    """A change of a chat: of its turn `number`, or of the chat itself."""

    seq: int
    state: str
    number: int | None = None
