"""Measure rank collapse in your own transformer.

The names below are imported when they are first used, so that ``import rankscope`` costs nothing and the command line
starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rankscope._errors import RankscopeError
from rankscope._version import __version__

if TYPE_CHECKING:
    from rankscope.metrics import METRICS
    from rankscope.models.loading import load
    from rankscope.monitor.gauge import Gauge
    from rankscope.reporting.pages import report
    from rankscope.results.comparison import compare
    from rankscope.results.run import Run, load_run
    from rankscope.surgery.operating import operate
    from rankscope.theory.designs.design import Design
    from rankscope.verbs.ablating import ablate
    from rankscope.verbs.bounding import bound
    from rankscope.verbs.decomposing import decompose
    from rankscope.verbs.diagnosing import doctor
    from rankscope.verbs.exacting import exact
    from rankscope.verbs.graphing import mask_graph
    from rankscope.verbs.measuring import measure
    from rankscope.verbs.predicting import predict
    from rankscope.verbs.predicting_remedies import predict_remedies
    from rankscope.verbs.remedying import remedy
    from rankscope.verbs.selftesting import selftest

__all__ = [
    "METRICS",
    "Design",
    "Gauge",
    "RankscopeError",
    "Run",
    "__version__",
    "ablate",
    "bound",
    "compare",
    "decompose",
    "doctor",
    "exact",
    "load",
    "load_run",
    "mask_graph",
    "measure",
    "operate",
    "predict",
    "predict_remedies",
    "remedy",
    "report",
    "selftest",
]

_HOME = {
    "METRICS": "rankscope.metrics",
    "Gauge": "rankscope.monitor.gauge",
    "Design": "rankscope.theory.designs.design",
    "Run": "rankscope.results.run",
    "ablate": "rankscope.verbs.ablating",
    "bound": "rankscope.verbs.bounding",
    "compare": "rankscope.results.comparison",
    "decompose": "rankscope.verbs.decomposing",
    "doctor": "rankscope.verbs.diagnosing",
    "exact": "rankscope.verbs.exacting",
    "load": "rankscope.models.loading",
    "load_run": "rankscope.results.run",
    "mask_graph": "rankscope.verbs.graphing",
    "measure": "rankscope.verbs.measuring",
    "operate": "rankscope.surgery.operating",
    "predict": "rankscope.verbs.predicting",
    "predict_remedies": "rankscope.verbs.predicting_remedies",
    "remedy": "rankscope.verbs.remedying",
    "report": "rankscope.reporting.pages",
    "selftest": "rankscope.verbs.selftesting",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rankscope' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
