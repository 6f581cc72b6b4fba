"""Faulty programs and their healthy twins, written from public taxonomies of faults and from reports.

The taxonomies are the 45 root causes of DEFault++ (arXiv 2604.28118), of which the 25 that concern attention are those
of arXiv 2508.04925, and the real issues that DEFault++ was evaluated on. Each cause is written as a person would write
it, and was marked as decidable or not from the model, a batch, the loss and the optimizer before anything was run::

    from benchmarks.exam import CASES

    faulty, healthy = CASES[0].make(True), CASES[0].make(False)

:mod:`.runs` has trainings that go wrong, for a recorder. :mod:`.blind` and :mod:`.blind_runs` have what was not
found at first, :mod:`.reports` public reports.
"""

from benchmarks.exam import attention, blind, blind_runs, network, runs
from benchmarks.exam.parts import CASES, NOT_WRITTEN, Case, Program

__all__ = ["CASES", "NOT_WRITTEN", "Case", "Program", "attention", "blind", "blind_runs", "network", "runs"]
