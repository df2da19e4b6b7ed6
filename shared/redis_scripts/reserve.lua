-- Release reservations, then make or renew others. KEYS: reserved (hash field -> 'blocks work_ms'), until (zset field -> ms)
-- ARGV: ttl (ms), number of those released, their fields, then field, value of each that is made.
-- A field is instance .. '/' .. owner .. '/' .. attempt.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl, released = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, released + 2 do
  redis.call('HDEL', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], ARGV[i])
end
for i = released + 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[2], now + ttl, ARGV[i])
end
return redis.status_reply('OK')
