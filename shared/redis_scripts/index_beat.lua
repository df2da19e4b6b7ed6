-- An agent tells its state, and learns what Redis holds. KEYS: blocks, taken, told. ARGV: code, state .. beat
-- Returns {taken or '', number of keys in the shard}.
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
local taken, keys = redis.call('HGET', KEYS[2], ARGV[1]) or '', redis.call('HLEN', KEYS[1])
if #taken < 32 then taken = '' end -- not ours: as if nothing were known
if keys == 0 and taken ~= '' then
  local _, there = struct.unpack('<I8I8', taken)
  if there > 0 then -- the hash has vanished
    redis.call('DEL', KEYS[2])
    taken = ''
  end
end
return {taken, keys}
