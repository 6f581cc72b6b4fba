"""An extension of rankscope: the module is imported with every command, so it imports nothing heavy itself."""

from rankscope.extensions import Extension


def _metrics() -> None:
    from rankscope_loud import metrics  # noqa: F401


def _remedies() -> None:
    from rankscope_loud import remedies  # noqa: F401


def _verbs() -> None:
    from rankscope_loud import declared  # noqa: F401


EXTENSION = Extension(
    name="loud",
    summary="Loudness of a model, as a metric, a remedy and a verb.",
    adds={"metric": _metrics, "remedy": _remedies, "verb": _verbs},
)
