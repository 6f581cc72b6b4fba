"""Nothing is fetched for a local folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session

from rankscope.errors import LoadError
from rankscope.models.loading import load
from rankscope.models.loading.no_requests import no_requests
from tests.models.connections import HOSTILE, attempts, refusing_connections


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user with a network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("spec", ["{}", "init:{}"])
def test_a_config_that_names_another_repository_opens_no_connection(spec: str, tmp_path: Path) -> None:
    load("init:tiny-bert").model.save_pretrained(tmp_path)
    for name, config in HOSTILE.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        tried: list[str] = []
        said = ""
        with refusing_connections(tried):
            try:
                load(spec.format(tmp_path))
            except LoadError as error:
                said = str(error)
        assert not tried, name
        if name in ("detr", "zoedepth", "upernet"):
            assert "names files that are not part of it" in said, name
            assert "owner/name" in said, name


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-vit"])
def test_verbs_open_no_connection(preset: str, tmp_path: Path) -> None:
    load(f"init:{preset}").model.save_pretrained(tmp_path)
    found = attempts(str(tmp_path))
    assert not found["tried"]
    assert found["ended"]["measure"] == "answered"


def test_the_switch_is_off_again_and_counts_for_open_connections_too() -> None:
    tried: list[str] = []
    with refusing_connections(tried):
        with no_requests("a model"), pytest.raises(LoadError, match="a model names files that are not part of it"):
            get_session().get("http://127.0.0.1:9/x")
        assert not tried
        with pytest.raises(Exception, match="no connections here"):
            get_session().get("http://127.0.0.1:9/x")
        assert tried
