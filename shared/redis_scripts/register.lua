-- Register a process or renew its registration.
-- KEYS: records (hash id -> head .. record), until (zset id -> ms), namespaces (hash model -> namespace .. proof)
-- ARGV: mode (claim | renew), id, incarnation (8 bytes), born (ms, 0 at the first claim), ttl (ms), record, model, namespace
-- Head: incarnation c8, born d, ttl d, model Hc0. Of two incarnations of one id the one claimed later stands, so that a
-- process that was replaced while it was stopped does not come back.
-- What is no record of ours is passed over.
-- Returns {'ok', born}, {'replaced'} or {'namespace', the one that the living instances of the model agreed on}.
local mode, id, incarnation, model, namespace = ARGV[1], ARGV[2], ARGV[3], ARGV[7], ARGV[8]
local born, ttl = tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local HEAD = 26

local old = redis.call('HGET', KEYS[1], id)
if old and #old >= HEAD then
  local theirs, since = struct.unpack('>c8d', old)
  if theirs ~= incarnation then
    if mode == 'claim' then
      born = math.max(born, now, since + 1)
    elseif since >= born then
      return {'replaced'}
    end
  end
end
if born == 0 then born = now end

local function others_live()
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now, '+inf')) do
    local value = other ~= id and redis.call('HGET', KEYS[1], other)
    if value then
      local whole, _, _, _, theirs = pcall(struct.unpack, '>c8ddHc0', value)
      if whole and theirs == model then return true end
    end
  end
  return false
end

if namespace ~= '' then
  local agreed = redis.call('HGET', KEYS[3], model)
  if agreed ~= namespace then
    if agreed and others_live() then return {'namespace', agreed} end
    redis.call('HSET', KEYS[3], model, namespace)
  end
end

redis.call('HSET', KEYS[1], id, struct.pack('>c8ddHc0', incarnation, born, ttl, #model, model) .. ARGV[6])
redis.call('ZADD', KEYS[2], now + ttl, id)
return {'ok', tostring(born)}
