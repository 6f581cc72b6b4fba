"""Shell completion. Nothing heavy is imported: a key press must not wait for torch."""

from __future__ import annotations


def complete_spec(incomplete: str) -> list[tuple[str, str]]:
    """Presets as ``init:NAME``, with their summaries; the shell completes folders.

    Example:
        >>> complete_spec("init:tiny-ber")[0][0]
        'init:tiny-bert'
    """
    from rankscope.models.presets import PRESETS

    names = {f"init:{preset.name}": preset.summary for preset in PRESETS.values()}
    return [(name, summary) for name, summary in names.items() if name.startswith(incomplete)]


def complete_site(incomplete: str) -> list[tuple[str, str]]:
    """Sites; completes the last one of a comma-separated list.

    Example:
        >>> [word for word, _ in complete_site("block.in,block.o")]
        ['block.in,block.out']
    """
    from rankscope.stream.sites import SITES

    before, comma, last = incomplete.rpartition(",")
    return [(f"{before}{comma}{name}", summary) for name, summary in SITES.items() if name.startswith(last)]
