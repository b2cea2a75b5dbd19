"""vLLM's own requests, as its API makes them and its scheduler changes them, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kdn.cache.keys import Namespace
from kdn.engines.vllm.checks import check_joins
from kdn.engines.vllm.identity import Identity
from kdn.engines.vllm.request_state import must_compute
from kdn.errors import UnsupportedError
from tests.codec.conftest import Tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns


def request(**sampling: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=4, **sampling)
    return Request("r", list(range(600)), params, None, resumable=True)


def test_requests_that_have_to_be_computed() -> None:
    from vllm import PoolingParams
    from vllm.v1.request import Request

    assert not must_compute(request())
    assert must_compute(request(prompt_logprobs=0))
    assert not must_compute(request(prompt_logprobs=0, skip_reading_prefix_cache=False))
    assert must_compute(request(skip_reading_prefix_cache=True))
    pooling = PoolingParams(task="plugin")
    pooling.verify(None)  # type: ignore[arg-type]
    assert must_compute(Request("p", [1, 2, 3], None, pooling))


def test_media_that_are_streamed_into_a_session() -> None:
    """vLLM changes the very request that the connector has seen."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    identity, session = Identity(Namespace(b"m", b"p")), request()
    before = identity.of(session)
    media = MultiModalFeatureSpec(
        data=None, modality="image", identifier="x", mm_position=PlaceholderRange(0, 16)
    )
    scheduler = SimpleNamespace(hash_block_size=16, log_stats=False)

    def go_on(*features: Any) -> None:
        more = request()
        more.mm_features = list(features)
        session.num_computed_tokens = session.num_tokens
        update = StreamingUpdate.from_request(more)
        assert update is not None
        Scheduler._update_request_as_session(scheduler, session, update)  # type: ignore[arg-type]

    go_on()
    assert session.num_prompt_tokens == 1200
    assert identity.of(session) == before
    go_on(media)
    with pytest.raises(UnsupportedError, match="media"):
        identity.of(session)


def test_a_connector_knows_whether_it_is_one_of_several() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kdn.engines.vllm.connector import KdnConnector, _is_made_by_another

    class One(KdnConnector):
        def __init__(self) -> None:
            self.is_beside_others = _is_made_by_another(self)

    class Several(MultiConnector):  # type: ignore[misc]
        def __init__(self) -> None:
            self.one = One()

    assert not One().is_beside_others
    assert Several().one.is_beside_others


def test_joins_are_refused_beside_other_connectors() -> None:
    settings: Any = SimpleNamespace(blend="auto")
    with pytest.raises(UnsupportedError, match="MultiConnector"):
        check_joins(settings, Tiny.with_layers(2).spec, is_beside_others=True)
    check_joins(SimpleNamespace(blend="off"), None, is_beside_others=True)  # type: ignore[arg-type]
