-- One change of one agent, atomically in hash and stream. KEYS: blocks, stream, taken. ARGV: entry, most stream entries
-- Entry: see shared/index/entry.py. blocks: key -> places, 9 bytes each (code, tier). taken: code -> seq, count, xor of
-- what the hash holds of it, kept by what really changed here.
-- Returns {status, taken}: ok; resync (no successor: nothing changed); differs (changed, but the agent's digest is another).
local entry = ARGV[1]
local version, op, tier, flags, n, _, code, seq, count, xor = struct.unpack('<BBBBHHc8I8I8c16', entry)
if version ~= 1 then return redis.error_reply('ERR unknown index entry version') end
local HEAD, KEY, PLACE, STATE = 56, 16, 9, 32
local ADD, DELETE, BEGIN, END, FORCE = 1, 2, 3, 4, 2

-- a hash that vanished (memory was evicted) takes all that is known of it along, so that every agent publishes anew
if redis.call('EXISTS', KEYS[1]) == 0 then
  for _, known in ipairs(redis.call('HVALS', KEYS[3])) do
    local _, there = 0, 0
    if #known >= STATE then _, there = struct.unpack('<I8I8', known) end
    if there > 0 then
      redis.call('DEL', KEYS[3])
      break
    end
  end
end

local held_seq, held_count, held_xor = 0, 0, string.rep('\0', KEY)
local held = redis.call('HGET', KEYS[3], code)
if held and #held < STATE then held = false end -- not ours: as if nothing were known
if held then held_seq, held_count, held_xor = struct.unpack('<I8I8c16', held) end
local successor = seq == held_seq + 1
if op == BEGIN then successor = seq > held_seq end
if not successor then return {'resync', held or ''} end

local words = {struct.unpack('>I4I4I4I4', held_xor)}
local function toggle(key, t)
  local k = {struct.unpack('>I4I4I4I4', key)}
  for i = 0, 3 do words[i + 1] = bit.bxor(words[i + 1], k[(i + t) % 4 + 1]) end
end

-- where this agent's place begins in a packed list
local function find(places)
  for at = 1, #places, PLACE do
    if string.sub(places, at, at + 7) == code then return at end
  end
end

local keys = {}
for i = 0, n - 1 do keys[i + 1] = string.sub(entry, HEAD + 1 + i * KEY, HEAD + (i + 1) * KEY) end
local put, gone = {}, {}
if n > 0 then
  local found = redis.call('HMGET', KEYS[1], unpack(keys))
  local place = code .. string.char(tier)
  for i, key in ipairs(keys) do
    local places = found[i] or ''
    local at = find(places)
    local rest = at and string.sub(places, 1, at - 1) .. string.sub(places, at + PLACE) or places
    local old = at and string.byte(places, at + 8)
    if old and (op == DELETE or old ~= tier) then
      toggle(key, old)
      held_count = held_count - 1
    end
    if op == ADD and old ~= tier then
      toggle(key, tier)
      held_count = held_count + 1
      put[#put + 1] = key
      put[#put + 1] = rest .. place
    elseif op == DELETE and old then
      if rest == '' then
        gone[#gone + 1] = key
      else
        put[#put + 1] = key
        put[#put + 1] = rest
      end
    end
  end
end
if #put > 0 then redis.call('HSET', KEYS[1], unpack(put)) end
if #gone > 0 then redis.call('HDEL', KEYS[1], unpack(gone)) end

for i = 1, 4 do words[i] = words[i] % 4294967296 end
held_xor = struct.pack('>I4I4I4I4', unpack(words))
if op == END and bit.band(flags, FORCE) ~= 0 then held_count, held_xor = count, xor end
held = struct.pack('<I8I8c16', seq, held_count, held_xor)
redis.call('HSET', KEYS[3], code, held)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'e', entry)
local compared = op == END or (op ~= BEGIN and bit.band(flags, 1) == 0)
if compared and (held_count ~= count or held_xor ~= xor) then return {'differs', held} end
return {'ok', held}
