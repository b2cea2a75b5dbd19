"""A process that forks, as servers with workers do: the child verifies with threads of its own."""

from __future__ import annotations

import os

import pytest

from kdn.delivery import assemble
from kdn.delivery.buffers import SHARED


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_that_verify() -> None:
    assert assemble._threads().submit(int).result(10) == 0  # the parent's are started
    SHARED._lock.acquire()  # as another thread of the parent may have it just then
    child = os.fork()
    if not child:
        try:
            done = assemble._threads().submit(lambda: 7).result(10) == 7
            taken = len(SHARED.take(4096).view) == 4096
            os._exit(0 if done and taken else 1)
        except BaseException:
            os._exit(2)
    SHARED._lock.release()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
