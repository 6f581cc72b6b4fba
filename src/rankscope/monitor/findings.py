"""What ``doctor`` finds in a model that is being trained, in the lines that ``doctor`` prints."""

from __future__ import annotations

from rankscope.examination import Finding


def is_shown(finding: Finding) -> bool:
    """Whether an experiment of ``doctor`` shows a fault."""
    return finding.kind == "fault" and finding.certainty == "shown"


def shown(finding: Finding) -> str:
    """Such a fault: what it is, what to change, its two numbers. No change is tried while a model is trained."""
    lines = [finding.sentence]
    if finding.change:
        lines.append(f"{'Change' if finding.tried else 'Hint'}: {finding.change.rstrip('.')}.")
    if finding.evidence:
        lines.append(f"Shown by: {finding.evidence}")
    return "\n".join(lines)
