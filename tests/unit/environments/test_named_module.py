"""A setting that names a class: Troupe's own, somebody else's, and none."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.errors import ConfigError
from environments.named_module import load_class

KNOWN = {"counter": "collections:Counter", "ordered": "collections:OrderedDict"}


def test_short_name_and_a_path_lead_to_the_class() -> None:
    from collections import Counter, defaultdict

    assert load_class("my.setting", "counter", KNOWN, dict) is Counter
    assert load_class("my.setting", "collections:defaultdict", KNOWN, dict) is defaultdict


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("conter", "my.setting: there is no 'conter'. Did you mean 'counter'"),
        ("xyz", "Known: counter, ordered. Name your own as"),
        ("no_such_module:Class", "there is no module 'no_such_module'"),
        ("collections:Missing", "derived from builtins.dict, and is None"),
        ("collections:deque", "derived from builtins.dict, and is <class 'collections.deque'>"),
    ],
)
def test_what_leads_to_no_class_is_error_that_names_setting(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_class("my.setting", name, KNOWN, dict)


def test_module_that_lacks_one_of_its_own_imports_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin.py").write_text("import a_library_that_is_missing\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken_plugin\.py, line 1: import a_lib.*No module named"):
        load_class("my.setting", "broken_plugin:Class", KNOWN, dict)
