"""The exam: ``python -m benchmarks.exam doctor [NAME ...]`` and ``python -m benchmarks.exam watch [NAME ...]``.

``doctor`` is asked about the cases of public taxonomies (by name) and the re-created reports (by number, such as 9 or
F3), each with its healthy twin. Whether an answer to a case names the cause is read by hand, against the sentence that
the case was written with; for a report, codes are compared and the printed change is made. ``watch`` records each
training and its twin, and prints alarms and what ``why()`` says. ``--write`` records the tables of the reports.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import torch

import rankscope as rs
from benchmarks.exam import CASES, Program, runs
from benchmarks.exam.reports import asking
from rankscope.verbs.doctor.checks import DoctorReport


def asked(program: Program) -> DoctorReport:
    """The report of one program."""
    return rs.doctor(
        program.model, program.inputs, labels=program.labels, loss=program.loss, optimizer=program.optimizer
    )


def doctor(names: list[str]) -> None:
    """Print each case with its answer, and the faults that are claimed of its twin."""
    for case in CASES:
        if names and case.make.__name__ not in names:
            continue
        torch.manual_seed(0)
        report = asked(case.make(True))
        torch.manual_seed(0)
        twin = asked(case.make(False))
        print(f"{case.make.__name__} ({case.cause}{'' if case.decidable else ', not decidable'}): {case.wrong}")
        for one in report.findings:
            print(f"  {one.kind}: {one.sentence}")
        print(*(f"  TWIN: {one.sentence}" for one in twin.faults), sep="\n", flush=True)


def watch(names: list[str]) -> None:
    """Print what is recorded of each training and of its twin."""
    logging.disable(logging.CRITICAL)
    for training in runs.RUNS:
        if names and training.run.__name__ not in names:
            continue
        decidable = "" if training.decidable else ", not decidable"
        print(f"{training.run.__name__} ({training.kind}, step {training.onset}{decidable}): {training.wrong}")
        for faulty in (True, False):
            torch.manual_seed(0)
            watched: list[Any] = []
            # the list is bound here, so that the training appends to its own
            training.run(faulty, lambda model, optimizer, kept=watched: kept.append(rs.watch(model, optimizer)))  # type: ignore[misc]
            for one in watched:
                print(*(f"  {'alarm' if faulty else 'TWIN'}: {alarm}" for alarm in one.alarms), sep="\n")
                print(f"  why: {one.why()}" if faulty else "", flush=True)
                one.close()


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exam", description=__doc__)
    parser.add_argument("half", choices=("doctor", "watch"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write the tables of the reports; needs all of them")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.half == "watch":
        watch(given.names)
        return
    asking.ask(given.names, write=given.write)
    if not given.write:
        doctor(given.names)


if __name__ == "__main__":
    main()
