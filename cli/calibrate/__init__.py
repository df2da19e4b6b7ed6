"""``mooncake calibrate``: latency models of an engine on this machine, measured and judged."""
