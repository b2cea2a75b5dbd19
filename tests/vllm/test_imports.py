"""What is imported before vLLM's engine starts."""

from __future__ import annotations

import subprocess
import sys


def test_the_connector_is_imported_without_numba() -> None:
    """On a CPU vLLM looks at all objects of all modules, and fails over one of llvmlite's."""
    code = (
        "import sys; import kdn.engines.vllm.connector; "
        "sys.exit(any(name in sys.modules for name in ('numba', 'llvmlite')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
