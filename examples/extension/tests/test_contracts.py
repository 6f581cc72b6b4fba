"""What rankscope promises about metrics, remedies and verbs holds for these too."""

from rankscope.testing import check_metric, check_remedy, check_verb


def test_metric() -> None:
    check_metric("nuclear_rank")


def test_remedy() -> None:
    check_remedy("small_branches")


def test_verb() -> None:
    check_verb("loudness")
