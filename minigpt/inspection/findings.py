"""What an inspection has to say, gathered while it goes on."""

from dataclasses import dataclass, field

MAX_FINDINGS = 20


@dataclass
class Findings:
    """Warnings and notes of one inspection: each said once, and no more of them than a person reads."""

    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def warn(self, sentence: str) -> None:
        """Add something that may be wrong with the file."""
        _add(self.warnings, sentence)

    def note(self, sentence: str) -> None:
        """Add something worth knowing that is not wrong."""
        _add(self.notes, sentence)


def _add(sentences: list[str], sentence: str) -> None:
    if sentence not in sentences and len(sentences) < MAX_FINDINGS:
        sentences.append(sentence)
