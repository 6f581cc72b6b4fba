"""Healthy trainings that plan what looks like a fault: no alarm, although none of them declares it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankscope as rs
from tests.monitor.healthy_kinds import KINDS, Kind


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_healthy_kind_is_not_alarmed(kind: Kind) -> None:
    torch.manual_seed(0)
    watches: list[Any] = []
    kind(lambda model, optimizer: watches.append(rs.watch(model, optimizer, schedule=4, actions=())))
    for watch in watches:
        watch.close()
    assert [watch.disabled for watch in watches] == [None]
    assert [alarm.sentence for watch in watches for alarm in watch.alarms] == []
