-- One moment of a shard. KEYS: stream, taken, told. Returns {last stream id, {code, taken, ...}, {code, told, ...}}.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local id = '0-0'
if last[1] then id = last[1][1] end
return {id, redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])}
