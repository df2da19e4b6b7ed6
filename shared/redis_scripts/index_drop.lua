-- May an agent drop its copies of some keys of a shard? Copies that others were allowed to drop lately do not count.
-- KEYS: blocks, drops. ARGV: code, copies that must be left, for how long an answer counts (ms), number n of living
-- codes, n codes, keys. drops: sorted set of key .. code by the time (ms) until which it counts. Returns 1 or 0 per key.
local PLACE = 9
local me, keep, hold, n = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local living = {}
for i = 5, 4 + n do living[ARGV[i]] = true end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)

local out = {}
for i = 5 + n, #ARGV do
  local key, live, mine = ARGV[i], 0, false
  local places = redis.call('HGET', KEYS[1], key) or ''
  for at = 1, #places, PLACE do
    local code = string.sub(places, at, at + 7)
    if living[code] and not redis.call('ZSCORE', KEYS[2], key .. code) then
      live = live + 1
      if code == me then mine = true end
    end
  end
  if mine and live > keep then
    redis.call('ZADD', KEYS[2], now + hold, key .. me)
    out[#out + 1] = 1
  else
    out[#out + 1] = 0
  end
end
return out
