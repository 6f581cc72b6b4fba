"""Measure rank collapse in your own transformer.

The names below are imported on first use, so that ``import rankscope`` is cheap and the command line starts fast.
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
    from rankscope.reporting.card import card
    from rankscope.reporting.pages import report
    from rankscope.runs.comparison import compare
    from rankscope.runs.querying import query
    from rankscope.runs.run import Run, load_run
    from rankscope.surgery.operating import operate
    from rankscope.sweeps.compacting import compact
    from rankscope.sweeps.running import sweep
    from rankscope.theory.designs.design import Design
    from rankscope.verbs.ablate.run import ablate
    from rankscope.verbs.bound.run import bound
    from rankscope.verbs.decompose.run import decompose
    from rankscope.verbs.doctor.run import doctor
    from rankscope.verbs.exact.run import exact
    from rankscope.verbs.masks.run import mask_graph
    from rankscope.verbs.measure.run import judge, measure
    from rankscope.verbs.predict.run import predict, predict_remedies
    from rankscope.verbs.remedy.run import remedy
    from rankscope.verbs.selftest.run import selftest

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
    "card",
    "compact",
    "compare",
    "decompose",
    "doctor",
    "exact",
    "judge",
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
    "ablate": "rankscope.verbs.ablate.run",
    "atlas": "rankscope.reporting.atlas_page",
    "bound": "rankscope.verbs.bound.run",
    "card": "rankscope.reporting.card",
    "compact": "rankscope.sweeps.compacting",
    "compare": "rankscope.runs.comparison",
    "decompose": "rankscope.verbs.decompose.run",
    "doctor": "rankscope.verbs.doctor.run",
    "exact": "rankscope.verbs.exact.run",
    "judge": "rankscope.verbs.measure.run",
    "load": "rankscope.models.loading",
    "load_run": "rankscope.runs.run",
    "mask_graph": "rankscope.verbs.masks.run",
    "measure": "rankscope.verbs.measure.run",
    "operate": "rankscope.surgery.operating",
    "predict": "rankscope.verbs.predict.run",
    "predict_remedies": "rankscope.verbs.predict.run",
    "query": "rankscope.runs.querying",
    "remedy": "rankscope.verbs.remedy.run",
    "report": "rankscope.reporting.pages",
    "reproduce": "rankscope.papers",
    "selftest": "rankscope.verbs.selftest.run",
    "sweep": "rankscope.sweeps.running",
}


_exported = names_of(__name__, _HOME)


def __getattr__(name: str) -> object:
    """An exported name, or the function of a verb in the registry."""
    if name not in _HOME and not name.startswith("_"):
        from rankscope.verbs._spec import VERBS, function_at

        if name in VERBS:
            return function_at(VERBS[name].run)
    return _exported(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
