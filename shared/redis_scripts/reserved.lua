-- Sums of the reservations that have not expired. KEYS: reserved, until. ARGV: owners whose entries do not count.
-- Returns {instance, blocks, attempts, work_ms, ...}.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, field in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], field)
  redis.call('ZREM', KEYS[2], field)
end
local besides = {}
for _, owner in ipairs(ARGV) do besides[owner] = true end
local all, sums, order = redis.call('HGETALL', KEYS[1]), {}, {}
for i = 1, #all, 2 do
  local instance, owner = string.match(all[i], '^([^/]*)/([^/]*)/')
  local blocks, work = string.match(all[i + 1], '^(%d+) (%d+)$')
  if instance and blocks and not besides[owner] then
    if not sums[instance] then
      sums[instance] = {0, 0, 0}
      order[#order + 1] = instance
    end
    local sum = sums[instance]
    sum[1], sum[2], sum[3] = sum[1] + tonumber(blocks), sum[2] + 1, sum[3] + tonumber(work)
  end
end
local out = {}
for _, instance in ipairs(order) do
  out[#out + 1] = instance
  for i = 1, 3 do out[#out + 1] = sums[instance][i] end
end
return out
