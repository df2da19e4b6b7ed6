-- The living of several kinds. KEYS: records, until, per kind. Returns {now (ms), {record with head, until, ...}, ...}.
-- An end that lies further off than the record's ttl was set before this clock was put back: nobody lives for that long.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local out = {tostring(now)}
for i = 1, #KEYS, 2 do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[i + 1], '-inf', now)) do
    redis.call('HDEL', KEYS[i], id)
    redis.call('ZREM', KEYS[i + 1], id)
  end
  local living, found = redis.call('ZRANGE', KEYS[i + 1], 0, -1, 'WITHSCORES'), {}
  for j = 1, #living, 2 do
    local value = redis.call('HGET', KEYS[i], living[j])
    if value then
      local whole, _, _, ttl = pcall(struct.unpack, '>c8dd', value)
      if whole and tonumber(living[j + 1]) > now + ttl then
        redis.call('ZADD', KEYS[i + 1], now + ttl, living[j])
        living[j + 1] = tostring(now + ttl)
      end
      found[#found + 1] = value
      found[#found + 1] = living[j + 1]
    end
  end
  out[#out + 1] = found
end
return out
