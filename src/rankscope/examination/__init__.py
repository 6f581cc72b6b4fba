"""Faults of a model: a linter whose facts come from experiments.

``experiments`` write outcomes, each with its control; ``rows`` read outcomes and say fault, place and change;
``examine`` asks the rows in the order in which they explain each other.
"""

from rankscope.examination.examine import Diagnosis, examine, find
from rankscope.examination.passes import Examination
from rankscope.examination.spec import ROWS, Finding, RowSpec, finding, row

__all__ = ["ROWS", "Diagnosis", "Examination", "Finding", "RowSpec", "examine", "find", "finding", "row"]
