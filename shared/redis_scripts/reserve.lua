-- Make, renew or release reservations. KEYS: reserved (hash field -> blocks), until (zset field -> ms)
-- ARGV: ttl (ms, 0 releases), then field, blocks per reservation. A field is instance .. '/' .. attempt.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl = tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
  if ttl > 0 then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('ZADD', KEYS[2], now + ttl, ARGV[i])
  else
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
  end
end
return redis.status_reply('OK')
