"""Import of large libraries without a search for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from policies.imports import large_imports


def test_no_garbage_is_collected_while_libraries_come() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), large_imports():
        assert not gc.isenabled()
        modules = [object() for _ in range(10)]
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen and modules, "what has come is left out of later collections"


@pytest.mark.slow
def test_library_imported_so_is_not_reported_as_leaked() -> None:
    code = "from policies.imports import large_imports\nwith large_imports():\n    import triton._C.libtriton"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
