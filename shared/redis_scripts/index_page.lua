-- Part of a shard's hash, by cursor. KEYS: blocks. ARGV: cursor, count. Returns {cursor, {key, places, ...}}.
return redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
