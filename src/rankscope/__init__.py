"""Measure rank collapse in your own transformer.

The names below are imported when they are first used, so that ``import rankscope`` costs nothing and the command line
starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of
from rankscope._version import __version__
from rankscope.errors import RankscopeError

if TYPE_CHECKING:
    from rankscope.metrics import METRICS
    from rankscope.models.loading import load
    from rankscope.models.stream import Stream
    from rankscope.monitor.gauge import Gauge
    from rankscope.papers import reproduce
    from rankscope.reporting.atlas_page import atlas
    from rankscope.reporting.pages import report
    from rankscope.runs.comparison import compare
    from rankscope.runs.querying import query
    from rankscope.runs.run import Run, load_run
    from rankscope.surgery.operating import operate
    from rankscope.sweeps.running import sweep
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
    "Stream",
    "__version__",
    "ablate",
    "atlas",
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
    "query",
    "remedy",
    "report",
    "reproduce",
    "selftest",
    "sweep",
]

_HOME = {
    "METRICS": "rankscope.metrics",
    "Gauge": "rankscope.monitor.gauge",
    "Design": "rankscope.theory.designs.design",
    "Run": "rankscope.runs.run",
    "Stream": "rankscope.models.stream",
    "ablate": "rankscope.verbs.ablating",
    "atlas": "rankscope.reporting.atlas_page",
    "bound": "rankscope.verbs.bounding",
    "compare": "rankscope.runs.comparison",
    "decompose": "rankscope.verbs.decomposing",
    "doctor": "rankscope.verbs.diagnosing",
    "exact": "rankscope.verbs.exacting",
    "load": "rankscope.models.loading",
    "load_run": "rankscope.runs.run",
    "mask_graph": "rankscope.verbs.graphing",
    "measure": "rankscope.verbs.measuring",
    "operate": "rankscope.surgery.operating",
    "predict": "rankscope.verbs.predicting",
    "predict_remedies": "rankscope.verbs.predicting_remedies",
    "query": "rankscope.runs.querying",
    "remedy": "rankscope.verbs.remedying",
    "report": "rankscope.reporting.pages",
    "reproduce": "rankscope.papers",
    "selftest": "rankscope.verbs.selftesting",
    "sweep": "rankscope.sweeps.running",
}


__getattr__ = names_of(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
