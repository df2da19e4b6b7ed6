"""The SSD tier of a store agent: what leaves DRAM stays in files, and comes back when it is asked for.

Pure: ``journal`` (the log's encoding and what is left of it after a crash), ``book`` (what lies where, what goes
first). Shells: ``files`` (segments, log, lock), ``jobs`` (what threads do), ``tier`` (an agent's), ``space`` (a
slab's).
"""
