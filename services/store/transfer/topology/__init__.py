"""Which NICs carry a slice: the topology matrix, paths over pairs of NICs, their health, and the cut into slices."""
