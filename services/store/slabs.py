"""The slabs of an agent: one for each deployment namespace, made when the first engine attaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from services.store.directory import Directory
from services.store.lower import Lower, NothingLower
from services.store.memory import stride_of
from services.store.preemption import Victim
from services.store.settings import StoreSettings
from services.store.slab import Slab, segment_name
from services.store.tenants import Quotas, read_quotas
from services.store.transfer.base import Generations, TransferEngine
from shared.blocks import ITEMSIZE, Namespace
from shared.errors import ConfigError, InvalidInput, MooncakeError

UNREGISTER_TIMEOUT = 2.0


class Slabs(Mapping[str, Slab]):
    """By segment name. ``pool_bytes`` is shared by all; ``slab_bytes`` bounds each. ``lower`` gives what lies below
    a new one."""

    def __init__(
        self,
        settings: StoreSettings,
        directory: Directory,
        threads: ThreadPoolExecutor,
        lower: Callable[[Slab], Lower] = lambda slab: NothingLower(),
    ) -> None:
        self._settings = settings
        self._lower = lower
        self._directory = directory
        self._threads = threads
        self._slabs: dict[str, Slab] = {}
        self._engine: TransferEngine | None = None
        self._location = ""
        named = read_quotas(settings.tenant_quotas) if settings.tenant_quotas else {}
        self.quotas = Quotas(settings.tenant_quota_bytes, named)
        self._abort: Callable[[Slab, Victim], None] = lambda slab, victim: None

    def bind(self, engine: TransferEngine, location: str = "cpu:0") -> None:
        """Slabs made from now on are registered there, as memory at ``location``."""
        self._engine, self._location = engine, location

    def on_abort(self, abort: Callable[[Slab, Victim], None]) -> None:
        """Called for a request that has to give way in a slab made from now on."""
        self._abort = abort

    def __getitem__(self, name: str) -> Slab:
        return self._slabs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._slabs))

    def __len__(self) -> int:
        return len(self._slabs)

    def attach(self, namespace: Namespace) -> Slab:
        """The namespace's slab, made now if it is the first time. Raises InvalidInput, and ConfigError where the pool
        has no room for it, naming the limit."""
        check(namespace)
        name = segment_name(namespace)
        if name not in self._slabs:
            self._slabs[name] = self._make(namespace.deployment())
        return self._slabs[name]

    def _make(self, namespace: Namespace) -> Slab:
        settings, stride = self._settings, stride_of(namespace.geometry)
        left = settings.pool_bytes - sum(slab.memory.size for slab in self._slabs.values())
        slots = min(settings.slab_bytes or left, left) // stride
        if slots < 1:
            raise ConfigError(
                f"no room for another namespace: a slot takes {stride} bytes, {left} are left of pool_bytes = "
                f"{settings.pool_bytes} (slab_bytes = {settings.slab_bytes}: 0 gives all to the first namespace)",
                field="slab_bytes" if left < settings.pool_bytes else "pool_bytes",
            )
        slab = Slab(namespace, slots, settings, self._directory, self._threads, self.quotas)
        slab.lower = self._lower(slab)
        slab.room.abort = partial(self._abort, slab)
        if self._engine is not None:
            register(self._engine, slab, self._location)
        return slab

    async def close(self) -> None:
        """After the last engine is gone, before the transfer engine closes: its transfers end first."""
        for slab in self._slabs.values():
            try:
                if self._engine is not None:
                    await self._engine.unregister_local_memory(slab.name, UNREGISTER_TIMEOUT)
            except MooncakeError:
                continue  # still in use: the mapping goes with the process
            slab.close()
        self._slabs.clear()


def register(engine: TransferEngine, slab: Slab, location: str) -> None:
    memory = slab.memory
    generations = Generations(memory.words_fd, memory.stride)
    engine.register_local_memory(memory.view, location, name=slab.name, fd=memory.fd, generations=generations)


def check(namespace: Namespace) -> None:
    """Raises InvalidInput for a namespace that describes no block."""
    for name in ("layers", "kv_heads", "head_dim", "block_size"):
        if not 0 < getattr(namespace, name) < 1 << 20:
            raise InvalidInput(f"namespace: {name} = {getattr(namespace, name)}", field=name)
    if namespace.dtype not in ITEMSIZE:
        raise InvalidInput(f"namespace: dtype {namespace.dtype!r} is none of {', '.join(ITEMSIZE)}", field="dtype")
