"""The four services of the mesh; each runs as ``python -m services.<name>``."""
