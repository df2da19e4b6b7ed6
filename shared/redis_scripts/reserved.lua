-- Sums of the reservations that have not expired. KEYS: reserved, until. Returns {instance, blocks, attempts, ...}.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, field in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], field)
  redis.call('ZREM', KEYS[2], field)
end
local all, blocks, attempts, order = redis.call('HGETALL', KEYS[1]), {}, {}, {}
for i = 1, #all, 2 do
  local instance = string.match(all[i], '^[^/]*')
  if not blocks[instance] then
    blocks[instance], attempts[instance] = 0, 0
    order[#order + 1] = instance
  end
  blocks[instance] = blocks[instance] + tonumber(all[i + 1])
  attempts[instance] = attempts[instance] + 1
end
local out = {}
for _, instance in ipairs(order) do
  out[#out + 1] = instance
  out[#out + 1] = blocks[instance]
  out[#out + 1] = attempts[instance]
end
return out
