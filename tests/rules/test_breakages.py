"""The table of breakages fits the code, the tests and docs/safety.md. ``make break-rules`` carries it out."""

from __future__ import annotations

from collections import Counter

import pytest

from . import model
from .model import DOCUMENT, ROOT, Breakage
from .table import BREAKAGES

LEAST = {"S1": 3, "S2": 3, "S3": 3, "S4": 2, "S5": 3, "S6": 2, "S7": 3, "S8": 2}

each = pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.id)


@each
def test_what_is_taken_out_is_in_the_code_exactly_once(breakage: Breakage) -> None:
    assert breakage.edits
    assert [fault for edit in breakage.edits if (fault := model.edit_fault(edit))] == []
    assert all(edit.old != edit.new for edit in breakage.edits)


@each
def test_the_tests_that_must_fail_exist(breakage: Breakage) -> None:
    assert breakage.tests
    assert [test for test in breakage.tests if not model.test_exists(test)] == []


def test_every_rule_is_broken_often_enough() -> None:
    counts = Counter(breakage.rule for breakage in BREAKAGES)
    assert {rule: counts[rule] >= least for rule, least in LEAST.items()} == dict.fromkeys(LEAST, True)
    assert set(counts) == set(LEAST)


def test_every_breakage_has_a_name_of_its_own() -> None:
    assert [name for name, times in Counter(breakage.id for breakage in BREAKAGES).items() if times > 1] == []


def test_each_lane_is_named_as_the_project_names_it() -> None:
    assert {breakage.lanes for breakage in BREAKAGES} <= {"both", "local", "tcp"}


def test_the_handoffs_that_must_still_succeed_exist() -> None:
    assert [test for test in {breakage.control for breakage in BREAKAGES} if not model.test_exists(test)] == []


def test_the_document_has_the_tables_that_follow_from_the_breakages() -> None:
    document = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    assert model.with_tables(document, BREAKAGES) == document, "run scripts/break-rules --write-docs"
