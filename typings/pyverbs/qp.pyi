from pyverbs.addr import AHAttr
from pyverbs.cq import CQ, CQEX
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.wr import SGE

class QPCap:
    def __init__(
        self,
        max_send_wr: int = 1,
        max_recv_wr: int = 10,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline_data: int = 0,
    ) -> None: ...

class QPInitAttrEx:
    def __init__(
        self,
        qp_type: int = 2,
        qp_context: object = None,
        scq: CQ | CQEX | None = None,
        rcq: CQ | CQEX | None = None,
        srq: object = None,
        cap: QPCap | None = None,
        sq_sig_all: int = 0,
        comp_mask: int = 0,
        pd: PD | None = None,
        *,
        send_ops_flags: int = 0,
    ) -> None: ...

class QPAttr:
    qp_state: int
    port_num: int
    path_mtu: int
    qp_access_flags: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    pkey_index: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    ah_attr: AHAttr
    def __init__(self, qp_state: int = 1, cur_qp_state: int = 0, port_num: int = 1) -> None: ...

class QPEx:
    wr_id: int
    wr_flags: int
    @property
    def qp_num(self) -> int: ...
    def __init__(self, creator: Context, init_attr: QPInitAttrEx) -> None: ...
    def to_init(self, qp_attr: QPAttr) -> None: ...
    def to_rtr(self, qp_attr: QPAttr) -> None: ...
    def to_rts(self, qp_attr: QPAttr) -> None: ...
    def query(self, attr_mask: int) -> tuple[QPAttr, object]: ...
    def modify(self, qp_attr: QPAttr, mask: int) -> None: ...
    def wr_start(self) -> None: ...
    def wr_rdma_read(self, rkey: int, remote_addr: int) -> None: ...
    def wr_rdma_write(self, rkey: int, remote_addr: int) -> None: ...
    def wr_set_sge(self, sge: SGE) -> None: ...
    def wr_complete(self) -> None: ...
    def close(self) -> None: ...
