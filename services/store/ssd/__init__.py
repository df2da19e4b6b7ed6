"""The SSD tier of a store agent: what leaves DRAM stays in files, and comes back when it is asked for.

Pure: ``journal`` (the log's encoding and what is left of it after a crash), ``book`` (what lies where, what goes
first), ``rest`` (how long a failing disk is left alone), ``trouble`` (what its errors mean). Shells: ``files``
(segments, log, lock), ``jobs`` (what threads do), ``writing`` and ``reading`` (down and up), ``tier`` (an agent's),
``space`` (a slab's), ``tally`` (what was done).
"""
