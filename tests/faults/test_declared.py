"""The list in the docs is the list of the tests."""

from __future__ import annotations

import json

from scripts.write_faults import DATA, ELSEWHERE, TABLE, declared, table

LEAST_KINDS = 25


def test_the_docs_list_what_is_done() -> None:
    written = json.loads(DATA.read_text(encoding="utf-8"))
    names = ("name", "done", "expected", "test")
    assert [{name: fault[name] for name in names} for fault in written] == declared()
    assert TABLE.read_text(encoding="utf-8") == table(written)


def test_every_fault_that_is_injected_here_came_out_as_expected() -> None:
    written = json.loads(DATA.read_text(encoding="utf-8"))
    here = [fault for fault in written if not fault["test"].endswith(ELSEWHERE)]
    assert len(here) >= LEAST_KINDS
    assert {fault.get("outcome") for fault in here} == {"as expected"}
