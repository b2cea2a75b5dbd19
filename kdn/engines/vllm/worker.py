"""The worker's side: loads into vLLM's paged memory and copies out of it what is to be published.

Blocks of a load that did not arrive are reported, and vLLM computes them. Copies out are made
between two steps, when nothing writes; on a GPU they are queued there (`saver.py`).

Chunks are named after the weights of the checkpoint. Before anything is published, and before vLLM
may use what was loaded, the weights must be those that it started with; otherwise all ends there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import torch

from kdn.cache.keys import Chunk
from kdn.cache.tensors import KVCache
from kdn.engines.vllm.layout import PagedCache
from kdn.engines.vllm.loader import EndedLoad, Loader, nothing_of
from kdn.engines.vllm.messages import LoadReport, SaveOrder, Step
from kdn.engines.vllm.pace import Pace
from kdn.engines.vllm.ranks import Ranks
from kdn.engines.vllm.saver import Saver
from kdn.engines.vllm.shared import SharedSession
from kdn.errors import KdnError
from kdn.session.delivered import COMPUTED

logger = logging.getLogger(__name__)

IDLE_S = 0.01
"""A step without tokens waits so long for a load to end, instead of spinning. Such steps take the
interpreter from the load: two milliseconds each beside one that takes forty. A request that arrives
meanwhile waits as long."""
LOOKUP_S = 0.003
"""The same, where only lookups are under way."""


class WorkerSide:
    """Its methods are called by vLLM's thread, in this order, once a step."""

    def __init__(
        self,
        shared: SharedSession,
        paged: PagedCache,
        weights_changed: Callable[[torch.cuda.Event | None], bool],
        answer_s: float,
        clock: Callable[[], float] = time.monotonic,
        ranks: Ranks | None = None,
        saver: Callable[[Counter[str]], Saver] | None = None,
        device_bytes: int = 0,
        tells_changes: bool = False,
    ) -> None:
        """`weights_changed` may wait for the event that it is given, but for no later work of the
        device. `ranks`: the others of this engine, if there are any. `saver`: copies out, where
        this is not done by vLLM's thread. `device_bytes`: for chunks that ranks put together.
        `tells_changes`: routers want to know what comes and goes."""
        self.counts: Counter[str] = Counter()
        self.loader = Loader(shared, paged, self.counts, answer_s, clock, ranks)
        self._ranks = ranks
        if ranks is not None:
            ranks.publish_with(self._publish, self.counts, device_bytes)
        self._shared, self._paged, self._clock = shared, paged, clock
        self._weights_changed, self._tells_changes = weights_changed, tells_changes
        self._saver = saver(self.counts) if saver else None
        self._is_over = False  # the weights have changed, or may have: once and for all
        self._ended: list[EndedLoad] = []  # without having begun
        self._failed_blocks: set[int] = set()
        self._report = LoadReport()
        self._step = Step()
        self._began_s = 0.0
        self._pace = Pace()
        self._before: torch.cuda.Event | None = None
        """What was queued on the device before this step, new weights among it."""
        self._has_told = False
        """In the last step, of loads: vLLM is about to go on with them."""

    def begin(self, step: Step) -> None:
        now_s = self._clock()
        self._pace.note(self._step.num_tokens, now_s - self._began_s)
        self._step, self._began_s = step, now_s
        self._is_over |= step.stopped
        if self.loader or step.loads or step.saves:
            self._before = self._paged.mark()
        if self._saver is not None and step.saves:
            self._saver.begin()

    def start_loads(self) -> None:
        for order in self._step.loads:
            if self._is_over:
                self._ended.append(nothing_of(order))
            else:
                self.loader.begin(order)

    def save(self) -> None:
        if not self._step.saves:
            return
        if self._saver is not None:
            self._save_queued(self._saver)
            return
        if self._has_other_weights():
            return
        for order in self._step.saves:
            try:
                with order.origin.resumed():
                    self._save(order)
            except (KdnError, RuntimeError):
                logger.exception("request %s is not published", order.request_id)

    def take_finished(self) -> set[str]:
        """Requests whose loads have ended, well or not."""
        self._rest()
        if self._saver is not None and self._saver.has_other_weights:
            self._end()
        every, self._ended = self._ended + self.loader.take_ended(), []
        is_over = bool(every) and self._has_other_weights()
        for ended in every:
            self._settle(nothing_of(ended.order) if is_over else ended)
        self._has_told = bool(every)
        return {ended.order.request_id for ended in every}

    def _save_queued(self, saver: Saver) -> None:
        if self._is_over or (self._ranks is not None and not self._ranks.has_part):
            return
        try:
            for request_id, chunks in saver.save(self._step).items():
                self._report.unsaved.setdefault(request_id, {}).update(chunks)
        except (KdnError, RuntimeError):
            logger.exception("what this step has computed is not published")

    def take_failed_blocks(self) -> set[int]:
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> LoadReport:
        report, self._report = self._report, LoadReport()
        if self._tells_changes:
            report.changes = self._shared.session.changes.take()
        return report

    def _has_other_weights(self) -> bool:
        """Than at start. Then nothing is loaded or published any more, here and, as soon as it is
        reported, by the scheduler's side."""
        if not self._is_over and self._weights_changed(self._before):
            self._end()
        return self._is_over

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = self._report.weights_changed = True
        self._weights_changed = lambda _: True  # and let go of the old ones
        self._saver = None
        logger.error(
            "kdn: the model has other weights than at start; "
            "from now on this engine neither loads nor publishes"
        )

    def _rest(self) -> None:
        """Without anything to compute, vLLM would spin and take the time from decoding. But if a
        load has just been told of, vLLM has something to compute as soon as it hears that, and it
        may hear it only after another step."""
        is_waiting = len(self.loader) or self._step.waiting
        if is_waiting and not self._step.num_tokens and not self._ended and not self._has_told:
            # Of several ranks only the scheduler's process hears of a lookup that has ended.
            self.loader.wait(IDLE_S if len(self.loader) else LOOKUP_S)

    def _settle(self, ended: EndedLoad) -> None:
        order, size = ended.order, self._paged.block_tokens
        self._failed_blocks.update(order.block_ids[ended.good_until // size : order.end // size])
        self._report.exact_until[order.request_id] = ended.exact_until
        if ended.good_until < order.end:
            self._report.failed_from[order.request_id] = ended.good_until
        self.counts["loads"] += 1
        loaded = ended.good_until - order.start
        self.counts["loaded_tokens"] += loaded
        self.counts["avoided_ms"] += round(1000 * self._pace.seconds(loaded))
        self.counts["failed_tokens"] += order.end - ended.good_until

    def _save(self, order: SaveOrder) -> None:
        if self._ranks is not None and not self._ranks.has_part:
            return
        took_s = self._clock() - self._began_s
        for chunk in order.chunks:
            if not self._shared.has_room():
                self.counts["unpublished_chunks"] += 1
                continue
            cache = self._paged.read(chunk.start, chunk.end, order.block_ids)
            saved_s = took_s * chunk.num_tokens / max(self._step.num_tokens, chunk.num_tokens)
            if self._ranks is None:
                self._publish(chunk, cache, order.exact_until, saved_s)
            elif not self._ranks.offer(chunk, cache, order.exact_until, saved_s):
                self.counts["unpublished_chunks"] += 1

    def _publish(
        self, chunk: Chunk, cache: KVCache, exact_until: int | None, saved_s: float
    ) -> None:
        """All heads of a chunk. From any thread."""
        self._shared.publish(chunk, cache, exact_until, saved_s)
        self._shared.session.keep(chunk, cache, COMPUTED)
        self.counts["published_chunks"] += 1
