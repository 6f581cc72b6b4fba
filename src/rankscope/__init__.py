"""Measure rank collapse in your own transformer.

The names below are imported on first use, so that ``import rankscope`` is cheap and the command line starts fast.
"""

# No `from __future__` here: that is an import like any other, and would come before the path is cleaned.
import sys

# For `python -m rankscope`, Python puts the current folder first on sys.path and imports this file before __main__: a
# typing.py in a downloaded folder would run instead of the library. `import rankscope` changes no path.
if (
    sys.argv[:1] == ["-m"]
    and {"rankscope", "-mrankscope"} & set(sys.orig_argv)
    and not getattr(sys.flags, "safe_path", False)
):
    del sys.path[0]

from typing import TYPE_CHECKING, Any

from rankscope._lazy import names_of
from rankscope._version import __version__
from rankscope.errors import RankscopeError
from rankscope.extensions import available, filled_by, missing

if TYPE_CHECKING:
    from rankscope.metrics import METRICS
    from rankscope.models.design import Design
    from rankscope.models.inputs import Inputs
    from rankscope.models.model import Model, load
    from rankscope.models.stream import Stream
    from rankscope.monitor.gauge import Gauge
    from rankscope.monitor.watch import watch
    from rankscope.reporting.pages import report
    from rankscope.runs.comparison import compare
    from rankscope.runs.run import Run, load_run
    from rankscope.surgery.operating import operate
    from rankscope.surgery.surgery import Surgery
    from rankscope.verbs.ablate.run import ablate
    from rankscope.verbs.doctor.run import doctor
    from rankscope.verbs.exact.run import exact
    from rankscope.verbs.measure.run import judge, measure
    from rankscope.verbs.remedy.run import remedy
    from rankscope.verbs.selftest.run import selftest

__all__ = [
    "METRICS",
    "Design",
    "Gauge",
    "Inputs",
    "Model",
    "RankscopeError",
    "Run",
    "Stream",
    "Surgery",
    "__version__",
    "ablate",
    "compare",
    "doctor",
    "exact",
    "judge",
    "load",
    "load_run",
    "measure",
    "operate",
    "remedy",
    "report",
    "selftest",
    "watch",
]


_exported = names_of(__name__)


def _views() -> None:
    from rankscope.runs import compare_show  # noqa: F401 registers how comparisons are shown
    from rankscope.verbs._spec import VERBS

    VERBS.load()


def _length_dependence() -> None:
    from rankscope.metrics import METRICS

    METRICS.load()


# Runs are in a layer below what says how they are shown; the two meet here.
filled_by("view", _views)
filled_by("length dependence", _length_dependence)


_COMMANDS = {
    "env": "`rankscope env`; in Python, rankscope.__version__ and the provenance of a run say the same",
    "ls": "`rankscope ls`; in Python the registries list themselves: rs.METRICS, rankscope.masks.MASKS",
}
"""Commands that are no functions, with what to type."""


def __getattr__(name: str) -> Any:
    """An exported name, the function of a verb in the registry, or a name of an extension."""
    if name not in __all__ and not name.startswith("_"):
        from rankscope.verbs._spec import VERBS

        offered = {name: get for extension in available() for name, get in extension.names.items()}
        if name in offered:
            return offered[name]()
        if name in VERBS:
            return VERBS[name].run()
        if absent := missing(name):
            raise absent
        if name in _COMMANDS:
            raise AttributeError(f"{name} is a command and no function: {_COMMANDS[name]}.", name=name)
    return _exported(name)


def __dir__() -> list[str]:
    from rankscope.verbs._spec import VERBS

    return sorted({*globals(), *__all__, *VERBS, *(name for extension in available() for name in extension.names)})
