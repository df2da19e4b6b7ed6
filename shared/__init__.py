"""What more than one service needs: blocks, messages, bus, metadata, engines, config, telemetry, errors."""
