-- An agent tells its state, and learns what Redis holds. KEYS: blocks, taken, told. ARGV: code, state .. beat
-- Returns {taken or '', number of keys in the shard}.
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
return {redis.call('HGET', KEYS[2], ARGV[1]) or '', redis.call('HLEN', KEYS[1])}
