class Device:
    @property
    def name(self) -> bytes: ...

class DeviceAttr:
    max_mr_size: int
    vendor_id: int
    max_qp_wr: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_cqe: int

class PortAttr:
    state: int
    active_mtu: int
    active_speed: int
    active_width: int
    link_layer: int
    lid: int

class GIDEntry:
    gid_index: int
    port_num: int
    gid_type: int
    def gid_str(self) -> str: ...

class AsyncEvent:
    event_type: int
    def ack(self) -> None: ...

class Context:
    def __init__(self, *, name: str) -> None: ...
    def query_device(self) -> DeviceAttr: ...
    def query_port(self, port_num: int) -> PortAttr: ...
    def query_gid_table(self, max_entries: int, flags: int = 0) -> list[GIDEntry]: ...
    def get_async_event(self) -> AsyncEvent: ...
    def close(self) -> None: ...

def get_device_list() -> list[Device]: ...
