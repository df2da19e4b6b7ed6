class SGE:
    addr: int
    length: int
    lkey: int
    def __init__(self, addr: int, length: int, lkey: int) -> None: ...
