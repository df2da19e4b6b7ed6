"""The ``mooncake`` command."""
