"""Ask ``doctor`` about every case and its twin: ``python -m benchmarks.exam [NAME ...]`` prints what it answers.

Whether an answer names the cause is read by hand, against the sentence that the case was written with.
"""

from __future__ import annotations

import sys
import warnings

import torch

import rankscope as rs
from benchmarks.exam import CASES, Program
from rankscope.verbs.doctor.checks import DoctorReport


def asked(program: Program) -> DoctorReport:
    """The report of one program."""
    return rs.doctor(
        program.model, program.inputs, labels=program.labels, loss=program.loss, optimizer=program.optimizer
    )


def main() -> None:
    """Print each case with its answer, and the faults that are claimed of its twin."""
    warnings.simplefilter("ignore")
    for case in CASES:
        if sys.argv[1:] and case.make.__name__ not in sys.argv[1:]:
            continue
        torch.manual_seed(0)
        report = asked(case.make(True))
        torch.manual_seed(0)
        twin = asked(case.make(False))
        print(f"{case.make.__name__} ({case.cause}{'' if case.decidable else ', not decidable'}): {case.wrong}")
        for one in report.findings:
            print(f"  {one.kind}: {one.sentence}")
        print(*(f"  TWIN: {one.sentence}" for one in twin.faults), sep="\n")


if __name__ == "__main__":
    main()
