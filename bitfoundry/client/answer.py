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
