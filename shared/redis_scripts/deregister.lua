-- Forget a process, unless another incarnation has taken its id. KEYS: records, until. ARGV: id, incarnation (8 bytes)
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old or string.sub(old, 1, 8) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
