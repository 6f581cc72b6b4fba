"""An extension of rankscope: the module is imported with every command, so it imports nothing heavy itself."""

from rankscope.extensions import Extension

EXTENSION = Extension(
    name="loud",
    summary="Loudness of a model, as a metric, a remedy and a verb.",
    adds={
        "metric": ("rankscope_loud.metrics",),
        "remedy": ("rankscope_loud.remedies",),
        "verb": ("rankscope_loud.declared",),
    },
)
