"""vLLM's connector interface (`KVConnectorBase_V1`, vLLM 0.32), handed on to kdn's own parts."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kdn.cache.keys import Namespace, seal_key
from kdn.codec.base import Codec
from kdn.delivery.known import Known
from kdn.engines.vllm.checks import (
    cache_dtype,
    check_blocks,
    check_config,
    check_cpu_layout,
    check_joins,
    check_weights,
    device_of,
    holds_bytes,
    is_fp8,
    live_weights,
    separator_of,
)
from kdn.engines.vllm.early import Prospect
from kdn.engines.vllm.event_messages import Messages, are_wanted
from kdn.engines.vllm.identity import Identity, spec_of_model
from kdn.engines.vllm.join_lookup import Wanted, know_join, with_join
from kdn.engines.vllm.layout import Heads, Layout, PagedCache
from kdn.engines.vllm.messages import LoadReport, Step
from kdn.engines.vllm.ranks import Ranks, open_ranks
from kdn.engines.vllm.saver import Saver
from kdn.engines.vllm.scheduler import SchedulerSide
from kdn.engines.vllm.settings import Settings
from kdn.engines.vllm.shared import SharedSession
from kdn.engines.vllm.staging import Staging
from kdn.engines.vllm.stats import OF_EACH_RANK, KdnPromMetrics, KdnStats, Taken
from kdn.engines.vllm.targets import layers_in_order, scales_of
from kdn.engines.vllm.warming import in_own_thread, warm_up_gpu
from kdn.engines.vllm.weights import Weights
from kdn.engines.vllm.worker import WorkerSide
from kdn.metrics import OF_VLLM

logger = logging.getLogger("vllm.kdn")

SEAMS_S = 15.0
"""For seams to be found and folded into the codec, while vLLM starts. Later they are found when
they are needed."""

MAKERS = 8
"""Frames between a connector and who made it, at most."""


@dataclass
class KdnMetadata(KVConnectorMetadata):  # type: ignore[misc]
    step: Step = field(default_factory=Step)


@dataclass
class KdnWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: LoadReport = field(default_factory=LoadReport)

    def aggregate(self, other: KdnWorkerMetadata) -> KdnWorkerMetadata:
        return KdnWorkerMetadata(self.report.joined(other.report))


def _is_made_by_another(connector: KVConnectorBase_V1) -> bool:
    """Whether it is one of several. vLLM tells a connector nothing of others; but whoever makes
    several of them (`MultiConnector`) is a connector itself."""
    frame = sys._getframe(1)
    for _ in range(MAKERS):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1) and maker is not connector:
            return True
    return False


class KdnConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._num_ranks = ranks = int(parallel.tensor_parallel_size)
        rank = None if role == KVConnectorRole.SCHEDULER else int(parallel.rank) % ranks
        self._settings = settings = Settings.parse(transfer.kv_connector_extra_config).for_engine(
            consumes=transfer.is_kv_consumer,
            produces=transfer.is_kv_producer,
            ranks=ranks,
            rank=rank,
        )
        check_config(vllm_config, settings)
        check_weights(vllm_config)
        check_blocks(kv_cache_config)
        # A cache that is away must not fail requests. vLLM reads this after making its connector.
        transfer.kv_load_failure_policy = settings.load_failure
        self._spec = spec = spec_of_model(vllm_config.model_config, vllm_config.load_config)
        check_joins(settings, spec, is_beside_others=_is_made_by_another(self))
        if role == KVConnectorRole.SCHEDULER and settings.blend == "separator":
            settings = replace(settings, separator=separator_of(vllm_config, settings))
        self._shared = SharedSession.acquire(
            settings.session, spec, cache_dtype(vllm_config), device_of(vllm_config),
            settings.seams or "",
        )  # fmt: skip
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._taken = Taken(OF_EACH_RANK if rank else OF_VLLM)
        self._ranks: Ranks | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._tells_changes = are_wanted(vllm_config, settings)
        self._messages: Messages | None = None
        if role == KVConnectorRole.SCHEDULER:
            identity = Identity(
                self._shared.session.namespace,
                is_fp8=is_fp8(vllm_config) or holds_bytes(kv_cache_config),
            )
            if self._tells_changes:
                self._messages = Messages(vllm_config, settings)
            self._scheduler = SchedulerSide(
                settings, identity, self._look_up, self._block_tokens, ranks=ranks,
                events=self._messages.events if self._messages else None,
                look_up_join=None if settings.blend == "off" else self._look_up_join,
            )  # fmt: skip
        else:
            engine = str(transfer.engine_id)
            self._ranks = open_ranks(self._shared.session, engine, rank or 0, ranks)
        told = settings.session
        logger.info("kdn: model %s, %s at %s", spec.fingerprint.hex(), told.codec, told.where)

    def _look_up(
        self, tokens: Any, namespace: Namespace, limit_s: float, prospect: Prospect
    ) -> Future[Known]:
        early = self._shared.early
        return self._shared.submit(lambda: early.look_up(tokens, namespace, limit_s, prospect))

    def _look_up_join(self, tokens: Any, namespace: Namespace, wanted: Wanted) -> Future[Known]:
        """Both at once."""
        session, source = self._shared.session, self._shared.seams

        async def ask() -> Known:
            plain, join = await asyncio.gather(
                session.know(
                    tokens, namespace=namespace, enough_kld=wanted.enough_kld,
                    block_tokens=self._block_tokens, whole=True, limit_s=wanted.limit_s,
                ),
                know_join(session, source, tokens, namespace, wanted),
            )  # fmt: skip
            return with_join(plain, join)

        return self._shared.submit(ask)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # the scheduler's side

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Which tokens of a load come from this host's memory, a folder, or from elsewhere; asked
        by vLLM from 0.32 on."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        assert self._scheduler is not None
        host = min(self._scheduler.host_tokens(request.request_id), num_external_tokens)
        is_remote = self._settings.is_remote
        place = CacheHitSource.EXTERNAL_UNSPECIFIED if is_remote else CacheHitSource.DISK
        found = {CacheHitSource.HOST: host, place: num_external_tokens - host}
        return {source: count for source, count in found.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> KdnMetadata:
        assert self._scheduler is not None
        return KdnMetadata(self._scheduler.step(scheduler_output).with_seal_key(b""))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, KdnWorkerMetadata):
            self._scheduler.loaded(report.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Everything was copied when it was computed: the blocks may go."""
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """vLLM goes on with its steps until loads have ended, also those of requests that are gone:
        before it sleeps, their blocks must not be written any more. Deadlines bound that."""
        return self._scheduler is not None and bool(self._scheduler.loading)

    def reset_cache(self) -> bool | None:
        """vLLM wants nothing known any more, perhaps because the weights are others now: that they
        are those of the checkpoint is what the names of chunks rest on."""
        if self._scheduler is not None:
            self._scheduler.stop()
            logger.warning("kdn: reset; from now on this engine neither loads nor publishes")
        return True

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        rank = config.parallel_config.rank % self._num_ranks
        heads = Heads.of_rank(self._spec.num_kv_heads, rank, self._num_ranks)
        names = layers_in_order(
            kv_caches, self._spec.num_layers, has_drafts=config.speculative_config is not None
        )
        layers = [config.compilation_config.static_forward_context[name] for name in names]
        paged = PagedCache(
            [kv_caches[name] for name in names], self._spec, heads, self._block_tokens,
            scales=scales_of(layers) if is_fp8(config) else None, dtype=cache_dtype(config),
        )  # fmt: skip
        if paged.layout is Layout.CPU:
            check_cpu_layout(config, heads.count, self._spec.head_dim, paged)
        self._worker = in_own_thread(paged.device, lambda: self._worker_for(paged, layers))
        if not rank:  # the others fetch only where the first is not there
            self._shared.submit(self._shared.session.start_fetcher)

    def _worker_for(self, paged: PagedCache, layers: list[torch.nn.Module]) -> WorkerSide:
        weights = live_weights(layers)
        return WorkerSide(
            self._shared, paged, weights.have_changed, self._settings.lookup_s,
            ranks=self._ranks, saver=self._saver_for(paged, weights),
            device_bytes=self._staging_bytes, tells_changes=self._tells_changes,
        )  # fmt: skip

    def _saver_for(
        self, paged: PagedCache, weights: Weights
    ) -> Callable[[Counter[str]], Saver] | None:
        """On a GPU, if it is one that kdn decodes and encodes on."""
        if paged.rows is None or paged.device.type != "cuda":
            self._prepared_seams()
            return None
        codec = self._shared.session.codec
        warm_up_gpu(codec, paged.rows, paged.dtype, self._prepared_seams())
        ranks = self._ranks
        if not self._settings.publish or (ranks is not None and not ranks.has_part):
            return None
        staging = Staging(paged, self._spec.num_layers, self._staging_bytes)
        logger.info(
            "kdn: %.2f GiB of GPU memory for %d chunks that wait to be published",
            staging.size_bytes / 2**30, len(staging),
        )  # fmt: skip
        hand_over = None if ranks is None else ranks.offer
        return lambda counts: Saver(self._shared, paged, staging, weights.look, counts, hand_over)

    def _prepared_seams(self) -> Codec | None:
        """The codec that repairs joins, made ready while vLLM starts."""
        if self._settings.blend == "off" or self._settings.seams is None:
            return None
        source = self._shared.seams
        try:
            return self._shared.submit(lambda: source.prepare(SEAMS_S)).result(2 * SEAMS_S)
        except Exception as error:
            logger.warning("kdn: seams are not ready: %r", error)
            return None

    @property
    def _staging_bytes(self) -> int:
        """The first of several ranks needs half of it for chunks that it has put together."""
        return self._settings.staging_bytes // (1 if self._ranks is None else 2)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, KdnMetadata):
            key = seal_key(self._settings.session.secret)
            self._worker.begin(connector_metadata.step.with_seal_key(key))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is not computed before all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """All layers are copied together, after the last."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._worker.take_finished() or None) if self._worker else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> KdnWorkerMetadata | None:
        report = self._worker.take_report() if self._worker else None
        return KdnWorkerMetadata(report) if report else None

    # both

    def get_kv_connector_stats(self) -> KdnStats | None:
        side = self._scheduler or self._worker
        return self._taken.take(side.counts) if side else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KdnStats:
        return KdnStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> KdnPromMetrics:
        return KdnPromMetrics(*given)

    def take_events(self) -> Iterable[Any]:
        return self._messages.take() if self._messages else ()

    def shutdown(self) -> None:
        if (messages := getattr(self, "_messages", None)) is not None:
            messages.close()
        ranks, self._ranks = getattr(self, "_ranks", None), None
        if ranks is not None:
            ranks.close()
        shared, self._shared = getattr(self, "_shared", None), None  # type: ignore[assignment]
        if shared is not None:
            shared.release()
